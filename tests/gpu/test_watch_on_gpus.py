"""The watch over real GPUs: its figures are sane, and this process is nobody else's.

Needs one GPU or more, which nobody else uses meanwhile. With torch or cupy this process holds a
context on each GPU, so that the driver lists it; without both, only figures and cost are checked.
"""

import importlib
import os
import time

import pynvml
import pytest

from tccl_profiler.watch import conditions_note, warnings, watching

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def gpus():
    pynvml.nvmlInit()
    try:
        return range(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def look(gpus):
    with watching(gpus, {os.getpid()}) as seen:
        return seen()


def use_each(gpus):
    """A context and some memory on every GPU; gives what must be kept alive."""
    for name in ("torch", "cupy"):
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        if name == "torch":
            return [library.zeros(2**20, device=f"cuda:{gpu}") for gpu in gpus]
        kept = []
        for gpu in gpus:
            with library.cuda.Device(gpu):
                kept.append(library.zeros(2**20))
        return kept
    pytest.skip("needs torch or cupy to hold a context")


def assert_between(low, figure, high):
    assert figure is None or low <= figure <= high


def test_figures_of_all_gpus_are_sane(gpus):
    conditions = look(gpus)
    print(conditions_note(conditions))
    assert [seen.gpu for seen in conditions] == list(gpus)
    for seen in conditions:
        assert seen.sm_mhz is not None
        assert_between(100, seen.sm_mhz, (seen.sm_max_mhz or 10_000) * 1.05)
        assert_between(100, seen.memory_mhz, 30_000)
        assert_between(0, seen.pcie_generation, 8)
        assert_between(0, seen.pcie_width, 32)
        assert_between(0, seen.temperature_c, 110)
        assert_between(0, seen.ecc_uncorrected, 10**6)
        if seen.pcie_generation and seen.pcie_generation_max:
            assert seen.pcie_generation <= seen.pcie_generation_max


def test_our_own_process_is_not_complained_about(gpus):
    kept = use_each(gpus)
    conditions = look(gpus)
    assert kept
    pids = {process.pid for seen in conditions for process in seen.other_processes or ()}
    assert os.getpid() not in pids
    told = warnings(conditions, loaded=False)
    assert not [sentence for sentence in told if "uses it too" in sentence]


def test_a_look_takes_a_fraction_of_a_second(gpus):
    with watching(gpus, {os.getpid()}) as seen:
        seen()
        begun = time.monotonic()
        for _ in range(10):
            seen()
        took_ms = (time.monotonic() - begun) / 10 / len(gpus) * 1e3
    print(f"a look takes {took_ms:.2f} ms a GPU")
    assert took_ms < 100
