"""The measuring kernels through NVRTC, for each GPU generation, and the cache of what it made."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from tccl_profiler.cuda_device import NAMES, kernel_source, source_text
from tccl_py.errors import MeasurementError
from tests import nvrtc
from tests.nvrtc import KernelUse, compile_kernels, find_nvrtc

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

TINY = 'extern "C" __global__ void nothing() {}'
WARNING = re.compile(r"\bwarning\b")
ABOUT_THE_GPU = re.compile(r"nvrtc: warning: Architectures prior to .* are deprecated")


def library(major):
    path = find_nvrtc(major)
    if path is None:
        pytest.skip(f"no NVRTC of CUDA {major} here: pip install '{WHEELS[major]}'")
    return path


@pytest.mark.parametrize(("major", "sm", "blocks"), CASES)
def test_the_kernels_compile_without_a_warning_and_a_pump_stays_in_registers(major, sm, blocks):
    cubin = compile_kernels(kernel_source(blocks), sm=sm, library=library(major))
    warnings = [line for line in cubin.log.splitlines() if WARNING.search(line)]
    assert [line for line in warnings if not ABOUT_THE_GPU.match(line)] == []
    assert cubin.code.startswith(b"\x7fELF")
    assert (cubin.sm, cubin.nvrtc.partition(".")[0]) == (sm, str(major))
    uses = {use.name: use for use in cubin.kernels}
    assert list(uses) == sorted(NAMES)
    # What spilled would be moved through the caches too, beside the data whose rate is measured.
    assert uses["pump"].spilled_bytes == uses["pump"].stack_bytes == 0
    for use in uses.values():
        assert 0 < use.registers <= REGISTERS // THREADS // blocks


@pytest.mark.parametrize(("major", "sm"), sorted({case[:2] for case in CASES}))
def test_the_kernel_that_proves_links_compiles_and_eight_blocks_fit_together(major, sm):
    source = source_text("memory.cu", "links.cu")
    cubin = compile_kernels(source, sm=sm, library=library(major))
    (use,) = cubin.kernels
    assert (use.name, use.spilled_bytes, use.stack_bytes) == ("prove", 0, 0)
    # Of 256 threads: what waits must be on the GPU together with what it waits for.
    assert 0 < use.registers <= REGISTERS // 256 // 4


@pytest.mark.parametrize("major", SMS)
def test_an_nvrtc_says_which_gpus_it_knows(major):
    assert set(SMS[major]) <= set(nvrtc.supported_sms(library(major)))
    assert re.fullmatch(rf"{major}\.\d+", nvrtc.nvrtc_version(library(major)))


# --- what is refused, and how


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int unused;\n__global__ void f() { nothing(); }", "(1): error: A namespace scope"),
        ('__global__ void f() { asm("odd;"); }', "Not a name of any known instruction: 'odd'"),
        ("#include <cuda.h>", '(1): catastrophic error: could not open source file "cuda.h"'),
        ("#warning nearly\n#error done for", "(2): catastrophic error: #error directive: done for"),
    ],
)
@pytest.mark.parametrize("major", SMS)
def test_a_refused_source_is_told_by_its_first_error(major, source, reason):
    version = nvrtc.nvrtc_version(library(major))
    with pytest.raises(MeasurementError) as caught:
        compile_kernels(source, sm=90, library=library(major))
    assert str(caught.value).startswith(f"kernels for sm 90: NVRTC {version}: p")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_only_the_assembler_refuses_is_told():
    source = """extern "C" __global__ void big(int* p) {
        __shared__ int a[1000000];
        a[*p] = 1, *p = a[p[1]];
    }"""
    with pytest.raises(MeasurementError, match=r"NVRTC .*: ptxas error"):
        compile_kernels(source, sm=90, library=library(12))


def test_an_error_that_the_log_does_not_tell_is_named(monkeypatch):
    monkeypatch.setattr(nvrtc, "first_error", lambda log: None)
    with pytest.raises(MeasurementError, match=r"NVRTC 12\.\d+: NVRTC_ERROR_COMPILATION$"):
        compile_kernels("nonsense", sm=90, library=library(12))


def test_a_gpu_that_nvrtc_does_not_know_is_named_with_those_it_knows():
    path = library(13)
    with pytest.raises(MeasurementError) as caught:
        compile_kernels(TINY, sm=70, library=path)
    assert "; take the NVRTC" in str(caught.value)


def test_a_library_that_is_no_nvrtc_is_named(tmp_path):
    (tmp_path / "libnvrtc.so.12").write_text("no library\n")
    for path in (tmp_path / "libnvrtc.so.12", tmp_path / "libnvrtc.so.13", Path("libc.so.6")):
        with pytest.raises(MeasurementError) as caught:
            compile_kernels(TINY, sm=90, library=path)
        assert str(caught.value).startswith(f"{path} cannot be loaded as NVRTC: ")
        assert str(caught.value).endswith("; a libnvrtc.so of CUDA 12 or newer is right")


def test_functions_that_are_not_inlined_count_for_the_kernel_that_calls_them():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Function properties for b
ptxas         .     400 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 400 bytes cumulative stack size
ptxas info    : Function properties for _Z1gPii
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'a' for 'sm_90'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, 16 bytes smem, 344 bytes cmem[0]
"""
    assert nvrtc.kernel_uses(log) == (
        KernelUse(name="a", registers=8, shared_bytes=16, stack_bytes=0, spilled_bytes=0),
        KernelUse(name="b", registers=40, shared_bytes=0, stack_bytes=408, spilled_bytes=16),
    )


def test_the_part_of_nvrtc_that_it_opens_by_name_is_loaded_from_beside_it(monkeypatch):
    path, load, loaded = library(13), nvrtc.ctypes.CDLL, []
    if not path.is_absolute():
        pytest.skip("the loader finds NVRTC, and what belongs to it")
    beside = path.with_name(f"libnvrtc-builtins.so.{nvrtc.nvrtc_version(path)}")
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: loaded.append(name) or load(name))
    compile_kernels(TINY, sm=90, library=path)
    assert loaded == [str(path), str(beside)]


# --- where NVRTC is looked for


@pytest.fixture
def no_wheels(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(nvrtc.metadata, "distribution", missing)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)


@pytest.mark.parametrize("major", SMS)
def test_an_installed_wheel_comes_first(major, monkeypatch, tmp_path):
    try:
        metadata.distribution(re.split("[>=]", WHEELS[major])[0])
    except metadata.PackageNotFoundError:
        pytest.skip(f"not installed: {WHEELS[major]}")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    path = find_nvrtc(major)
    assert path.name == f"libnvrtc.so.{major}"
    assert path.parent.parent.parent.name == "nvidia"


@pytest.mark.parametrize("variable", ["CUDA_PATH", "CUDA_HOME"])
@pytest.mark.parametrize("folder", ["lib64", "lib"])
def test_a_toolkit_is_found_by_its_variable(variable, folder, no_wheels, monkeypatch, tmp_path):
    path = tmp_path / folder / "libnvrtc.so.99"
    path.parent.mkdir()
    path.touch()
    monkeypatch.setenv(variable, str(tmp_path))
    assert find_nvrtc(99) == path
    assert find_nvrtc(98) is None


def test_what_the_loader_finds_is_named_as_the_loader_knows_it(no_wheels):
    path = find_nvrtc(12) or find_nvrtc(13)
    if path is None or path.is_absolute():
        pytest.skip("the loader finds no NVRTC here")
    assert path.name == str(path)
    assert nvrtc.nvrtc_version(path)


def test_a_wheel_without_a_list_of_its_files_is_passed_over(no_wheels, monkeypatch):
    class Bare:
        files = None

    monkeypatch.setattr(nvrtc.metadata, "distribution", lambda name: Bare())
    assert find_nvrtc(99) is None


# --- the cache
