"""The measuring kernels through NVRTC, for each GPU generation."""

import re

import pytest

from tccl_profiler.cuda_device import NAMES, kernel_source, source_text
from tests.nvrtc import compile_kernels, find_nvrtc, kernel_uses

WHEELS = {12: "nvidia-cuda-nvrtc-cu12>=12.8", 13: "nvidia-cuda-nvrtc>=13"}
SMS = {12: (70, 75, 80, 86, 89, 90, 100, 120), 13: (75, 80, 86, 89, 90, 100, 120)}
# A multiprocessor of sm 75 has 1,024 threads: one block.
CASES = [
    (major, sm, blocks)
    for major, sms in SMS.items()
    for sm in sms
    for blocks in (1, 2)
    if (sm, blocks) != (75, 2)
]

REGISTERS, THREADS = 65536, 544  # of a multiprocessor; of a block, whose 17 warps have to fit

WARNING = re.compile(r"\bwarning\b")
ABOUT_THE_GPU = re.compile(r"nvrtc: warning: Architectures prior to .* are deprecated")


def library(major):
    path = find_nvrtc(major)
    if path is None:
        pytest.skip(f"no NVRTC of CUDA {major} here: pip install '{WHEELS[major]}'")
    return path


@pytest.mark.parametrize(("major", "sm", "blocks"), CASES)
def test_the_kernels_compile_without_a_warning_and_a_pump_stays_in_registers(major, sm, blocks):
    code, log = compile_kernels(kernel_source(blocks), sm=sm, library=library(major))
    warnings = [line for line in log.splitlines() if WARNING.search(line)]
    assert [line for line in warnings if not ABOUT_THE_GPU.match(line)] == []
    assert code.startswith(b"\x7fELF")
    uses = kernel_uses(log)
    assert set(uses) == set(NAMES)
    # What spilled would be moved through the caches too, beside the data whose rate is measured.
    assert uses["pump"].spilled_bytes == uses["pump"].stack_bytes == 0
    for use in uses.values():
        assert 0 < use.registers <= REGISTERS // THREADS // blocks


@pytest.mark.parametrize(("major", "sm"), sorted({case[:2] for case in CASES}))
def test_the_kernel_that_proves_links_compiles_and_eight_blocks_fit_together(major, sm):
    source = source_text("memory.cu", "links.cu")
    _, log = compile_kernels(source, sm=sm, library=library(major))
    (use,) = kernel_uses(log).values()
    assert (use.name, use.spilled_bytes, use.stack_bytes) == ("prove", 0, 0)
    # Of 256 threads: what waits must be on the GPU together with what it waits for.
    assert 0 < use.registers <= REGISTERS // 256 // 4


def test_a_source_that_is_refused_fails_with_what_the_compiler_said():
    with pytest.raises(AssertionError, match="Not a name of any known instruction: 'odd'"):
        compile_kernels('__global__ void f() { asm("odd;"); }', sm=90, library=library(12))
