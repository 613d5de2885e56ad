"""The measuring kernels through NVRTC, for each GPU generation, and the cache of what it made."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from tccl_profiler.cuda import nvrtc
from tccl_profiler.cuda.nvrtc import Cubin, KernelUse, compile_kernels, find_nvrtc
from tccl_py.errors import MeasurementError

WHEELS = {12: "nvidia-cuda-nvrtc-cu12>=12.8", 13: "nvidia-cuda-nvrtc>=13"}
SMS = {12: (70, 75, 80, 86, 89, 90, 100, 120), 13: (75, 80, 86, 89, 90, 100, 120)}
CASES = [(major, sm) for major, sms in SMS.items() for sm in sms]

REGISTERS, THREADS = 65536, 544  # of a multiprocessor; of a block, whose 17 warps have to fit

TINY = 'extern "C" __global__ void nothing() {}'
WARNING = re.compile(r"\bwarning\b")
ABOUT_THE_GPU = re.compile(r"nvrtc: warning: Architectures prior to .* are deprecated")


def library(major):
    path = find_nvrtc(major)
    if path is None:
        pytest.skip(f"no NVRTC of CUDA {major} here: pip install '{WHEELS[major]}'")
    return path


@pytest.mark.parametrize(("major", "sm"), CASES)
def test_the_kernels_compile_without_a_warning_and_a_pump_stays_in_registers(major, sm):
    cubin = compile_kernels(nvrtc.kernel_source(), sm=sm, library=library(major))
    warnings = [line for line in cubin.log.splitlines() if WARNING.search(line)]
    assert [line for line in warnings if not ABOUT_THE_GPU.match(line)] == []
    assert cubin.code.startswith(b"\x7fELF")
    assert (cubin.sm, cubin.nvrtc.partition(".")[0]) == (sm, str(major))
    uses = {use.name: use for use in cubin.kernels}
    assert list(uses) == ["echo", "pump", "pump_check", "stamp"]
    # What spilled would be moved through the caches too, beside the data whose rate is measured.
    assert uses["pump"].spilled_bytes == uses["pump"].stack_bytes == 0
    for use in uses.values():
        assert 0 < use.registers <= REGISTERS // THREADS


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
    with pytest.raises(MeasurementError, match=r"NVRTC .*: ptxas error .*too much shared data"):
        compile_kernels(source, sm=90, library=library(12))


def test_an_error_that_the_log_does_not_tell_is_named(monkeypatch):
    monkeypatch.setattr(nvrtc, "_first_error", lambda log: None)
    with pytest.raises(MeasurementError, match=r"NVRTC 12\.\d+: NVRTC_ERROR_COMPILATION$"):
        compile_kernels("nonsense", sm=90, library=library(12))


def test_a_gpu_that_nvrtc_does_not_know_is_named_with_those_it_knows():
    path = library(13)
    with pytest.raises(MeasurementError) as caught:
        compile_kernels(TINY, sm=70, library=path)
    known = ", ".join(map(str, nvrtc.supported_sms(path)))
    assert str(caught.value) == (
        f"kernels for sm 70: NVRTC {nvrtc.nvrtc_version(path)} ({path}) compiles for {known};"
        " take the NVRTC of a CUDA that knows this GPU"
    )


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
    assert nvrtc._kernel_uses(log) == (
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


class Compiler:
    """Stands in for NVRTC: counts what it compiles, and the source and version can be changed."""

    def __init__(self, monkeypatch):
        self.source, self.version, self.runs = TINY, "12.9", 0
        monkeypatch.setattr(nvrtc, "kernel_source", lambda: self.source)
        monkeypatch.setattr(nvrtc, "nvrtc_version", lambda library: self.version)
        monkeypatch.setattr(nvrtc, "compile_kernels", self.compile)

    def compile(self, source, *, sm, library):
        self.runs += 1
        code = f"{source} {sm} {self.version}".encode()
        return Cubin(code=code, sm=sm, nvrtc=self.version, log=f"run {self.runs}", kernels=())

    def get(self, directory, sm=90):
        return nvrtc.cached_cubin(sm=sm, library=Path("libnvrtc.so"), directory=directory)


@pytest.fixture
def compiler(monkeypatch):
    return Compiler(monkeypatch)


def test_kernels_are_compiled_once(compiler, tmp_path):
    place = tmp_path / "not" / "yet"
    assert compiler.get(place) == compiler.get(place)
    assert compiler.runs == 1
    assert place.stat().st_mode & 0o777 == 0o700


def test_another_gpu_source_version_or_option_is_compiled_anew(compiler, tmp_path, monkeypatch):
    compiler.get(tmp_path)
    assert compiler.get(tmp_path, sm=80).sm == 80
    compiler.version = "13.0"
    assert compiler.get(tmp_path).nvrtc == "13.0"
    compiler.source += "\n"
    assert compiler.get(tmp_path).code.startswith(compiler.source.encode())
    monkeypatch.setattr(nvrtc, "OPTIONS", ())
    compiler.get(tmp_path)
    assert compiler.runs == len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:20],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
    ],
)
def test_a_damaged_file_is_compiled_anew_and_replaced(compiler, tmp_path, damage):
    first = compiler.get(tmp_path)
    [path] = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = compiler.get(tmp_path)
    assert (again.code, again.log) == (first.code, "run 2")
    assert compiler.get(tmp_path) == again
    assert [path] == list(tmp_path.iterdir())


def test_a_file_under_another_name_does_not_count(compiler, tmp_path):
    compiler.get(tmp_path, sm=80)
    [path] = tmp_path.iterdir()
    compiler.get(tmp_path, sm=90)
    [other] = set(tmp_path.iterdir()) - {path}
    path.replace(other)
    assert compiler.get(tmp_path, sm=90).sm == 90
    assert compiler.runs == 3


def test_a_file_of_another_version_of_the_package_is_compiled_anew(compiler, tmp_path):
    compiler.get(tmp_path)
    [path] = tmp_path.iterdir()
    key, payload = bytes.fromhex(path.name.rpartition("-")[2]), b"\x80"  # an empty struct
    path.write_bytes(nvrtc._digest(key, payload) + payload)
    assert compiler.get(tmp_path).log == "run 2"


def test_without_a_place_to_keep_them_kernels_are_compiled_each_time(compiler, tmp_path):
    (tmp_path / "file").touch()
    for place in (None, tmp_path / "file", tmp_path / "file" / "below", Path("/proc/tccl-py")):
        compiler.runs = 0
        assert compiler.get(place).log == "run 1"
        assert compiler.get(place).log == "run 2"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_nothing_behind(compiler, tmp_path):
    compiler.get(tmp_path)
    [path] = tmp_path.iterdir()
    path.unlink()
    path.mkdir()  # nothing can be renamed to it, nor read
    assert compiler.get(tmp_path).log == "run 2"
    assert list(tmp_path.iterdir()) == [path]


def test_processes_that_compile_at_once_get_the_same(tmp_path):
    path = library(12)
    program = f"""
import hashlib, pathlib
from tccl_profiler.cuda import nvrtc
nvrtc.kernel_source = lambda: {TINY!r}
place, library = pathlib.Path({str(tmp_path)!r}), pathlib.Path({str(path)!r})
for _ in range(3):
    cubin = nvrtc.cached_cubin(sm=90, library=library, directory=place)
    print(hashlib.sha256(cubin.code).hexdigest())
"""

    def run(_):
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
        )

    with ThreadPoolExecutor(4) as pool:
        told = [line for done in pool.map(run, range(4)) for line in done.stdout.split()]
    assert len(told) == 12
    assert len(set(told)) == 1
    [kept] = tmp_path.iterdir()
    assert kept.name.startswith("kernels-sm_90-")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/tccl-py"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/tccl-py"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/tccl-py"),
        ({"HOME": "/h"}, "/h/.cache/tccl-py"),
        ({"HOME": ""}, None),
        ({"HOME": "relative"}, None),
    ],
)
def test_the_cache_is_where_the_environment_says(environment, expected, monkeypatch):
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert nvrtc.cache_directory() == (expected and Path(expected))


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def homeless(path):
        return path

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", homeless)  # as for a user id without an entry
    assert nvrtc.cache_directory() is None
