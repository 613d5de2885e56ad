"""Compiling the kernels with NVRTC, NVIDIA's compiler as a library; no GPU and no cupy is needed.

The profiler itself compiles through cupy, on a GPU's host; here it is shown that every GPU that is
supported gets its kernels, and what they take.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from importlib import metadata
from pathlib import Path

import msgspec

from tccl_py.errors import MeasurementError

SOURCE_NAME = "pump.cu"
OPTIONS = ("--std=c++17", "--ptxas-options=-v")  # -v puts what each kernel needs into the log

_ERROR = re.compile(r"\b(error|fatal)\s*:")


class KernelUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one kernel takes of a multiprocessor, functions that it calls included.

    Args:
        registers: a thread's.
        shared_bytes: a block's, fixed when compiling.
        stack_bytes: a thread's, in local memory.
        spilled_bytes: of registers stored to and loaded from local memory, counted in the code.
    """

    name: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spilled_bytes: int


class Cubin(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels as machine code, ready for cuModuleLoadData.

    Args:
        code: an ELF file.
        sm: compute capability it is for, 10 x major + minor; GPUs of the same major version and
            an equal or later minor one run it too.
        nvrtc: version that made it, such as `12.9`.
        log: all that NVRTC said: warnings, and what each kernel uses.
        kernels: what each kernel uses, by name; none if this NVRTC does not say.
    """

    code: bytes
    sm: int
    nvrtc: str
    log: str
    kernels: tuple[KernelUse, ...]


# --- where NVRTC is


def find_nvrtc(major: int) -> Path | None:
    """Look for the NVRTC of a CUDA version: in wheels, where the loader looks, in toolkits.

    What the loader finds by itself comes back as a bare name, to be loaded by that name.
    """
    name = f"libnvrtc.so.{major}"
    for path in _in_wheels(major, name):
        if path.is_file():
            return path
    with contextlib.suppress(OSError):
        ctypes.CDLL(name)
        return Path(name)
    return next((path for path in _in_toolkits(major, name) if path.is_file()), None)


def _in_wheels(major: int, name: str) -> Iterator[Path]:
    """Up to CUDA 12 the wheel's name has the version; from 13 on the wheel's version does."""
    for wheel in (f"nvidia-cuda-nvrtc-cu{major}", "nvidia-cuda-nvrtc"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.distribution(wheel).files or ():
                if file.name == name:
                    yield Path(str(file.locate()))


def _in_toolkits(major: int, name: str) -> Iterator[Path]:
    named = [os.environ.get(variable, "") for variable in ("CUDA_PATH", "CUDA_HOME")]
    roots = [Path(root).absolute() for root in named if root]
    roots += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob(f"cuda-{major}*"))]
    for root in roots:
        yield root / "lib64" / name
        yield root / "lib" / name


# --- compiling


def nvrtc_version(library: Path) -> str:
    """Version of an NVRTC, such as `12.9`.

    Raises:
        MeasurementError: this is no NVRTC.
    """
    return _Nvrtc(library).version()


def supported_sms(library: Path) -> tuple[int, ...]:
    """Compute capabilities that an NVRTC compiles for, ascending.

    Raises:
        MeasurementError: this is no NVRTC.
    """
    return _Nvrtc(library).supported()


def compile_kernels(source: str, *, sm: int, library: Path) -> Cubin:
    """Compile CUDA C++ for one compute capability; the kernels here take half a second.

    Raises:
        MeasurementError: no NVRTC, one that does not know this GPU, or it refuses the source.
    """
    nvrtc = _Nvrtc(library)
    version, known = nvrtc.version(), nvrtc.supported()
    if sm not in known:
        raise MeasurementError(
            f"kernels for sm {sm}: NVRTC {version} ({library}) compiles for"
            f" {', '.join(map(str, known))}; take the NVRTC of a CUDA that knows this GPU"
        )
    code, log = nvrtc.compile(source, sm)
    return Cubin(code=code, sm=sm, nvrtc=version, log=log, kernels=kernel_uses(log))


class _Nvrtc:
    """One loaded libnvrtc. Loading it again costs microseconds: the loader counts references."""

    def __init__(self, library: Path) -> None:
        self._path = library
        try:
            self._lib = ctypes.CDLL(str(library))
            _declare(self._lib)
        except (OSError, AttributeError) as error:
            raise MeasurementError(
                f"{library} cannot be loaded as NVRTC: {error}; a libnvrtc.so of CUDA 12 or newer"
                " is right"
            ) from error

    def version(self) -> str:
        major, minor = c_int(), c_int()
        self._check(self._lib.nvrtcVersion(major, minor))
        return f"{major.value}.{minor.value}"

    def supported(self) -> tuple[int, ...]:
        count = c_int()
        self._check(self._lib.nvrtcGetNumSupportedArchs(count))
        sms = (c_int * count.value)()
        self._check(self._lib.nvrtcGetSupportedArchs(sms))
        return tuple(sorted(sms))

    def compile(self, source: str, sm: int) -> tuple[bytes, str]:
        """Cubin and log."""
        self._load_builtins()
        with self._program(source) as program:
            options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture=sm_{sm}")]
            given = (c_char_p * len(options))(*options)
            status = self._lib.nvrtcCompileProgram(program, len(options), given)
            # The compiler's part of the log and the assembler's have a NUL between them at times.
            said = self._result(program, "ProgramLog").decode("utf-8", "replace")
            log = said.replace("\0", "\n").strip()
            if status:
                reason = first_error(log) or self._name_of(status)
                raise MeasurementError(f"kernels for sm {sm}: NVRTC {self.version()}: {reason}")
            return self._result(program, "CUBIN"), log

    def _load_builtins(self) -> None:
        """Load what NVRTC opens by a bare name: CUDA 13.0's wheel does not look beside itself."""
        beside = self._path.parent / f"libnvrtc-builtins.so.{self.version()}"
        if self._path.is_absolute() and beside.is_file():
            with contextlib.suppress(OSError):  # NVRTC then says what is missing
                ctypes.CDLL(str(beside))

    @contextlib.contextmanager
    def _program(self, source: str) -> Iterator[c_void_p]:
        program = c_void_p()
        self._check(
            self._lib.nvrtcCreateProgram(
                program, source.encode(), SOURCE_NAME.encode(), 0, None, None
            )
        )
        try:
            yield program
        finally:
            self._lib.nvrtcDestroyProgram(program)

    def _result(self, program: c_void_p, what: str) -> bytes:
        """Fetch what a nvrtcGet... gives, whose size its nvrtcGet...Size tells."""
        size = c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, size))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            raise MeasurementError(f"NVRTC ({self._path}): {self._name_of(status)}")

    def _name_of(self, status: int) -> str:
        name: bytes = self._lib.nvrtcGetErrorString(status)
        return name.decode()


def _declare(lib: ctypes.CDLL) -> None:
    """Argument types of nvrtc.h: without them ctypes would cut pointers to 32 bits."""
    strings = POINTER(c_char_p)
    lib.nvrtcVersion.argtypes = [POINTER(c_int), POINTER(c_int)]
    lib.nvrtcGetNumSupportedArchs.argtypes = [POINTER(c_int)]
    lib.nvrtcGetSupportedArchs.argtypes = [POINTER(c_int)]
    lib.nvrtcCreateProgram.argtypes = [
        POINTER(c_void_p), c_char_p, c_char_p, c_int, strings, strings,
    ]  # fmt: skip
    lib.nvrtcDestroyProgram.argtypes = [POINTER(c_void_p)]
    lib.nvrtcCompileProgram.argtypes = [c_void_p, c_int, strings]
    for what in ("ProgramLog", "CUBIN"):
        getattr(lib, f"nvrtcGet{what}Size").argtypes = [c_void_p, POINTER(c_size_t)]
        getattr(lib, f"nvrtcGet{what}").argtypes = [c_void_p, c_char_p]
    lib.nvrtcGetErrorString.argtypes = [c_int]
    lib.nvrtcGetErrorString.restype = c_char_p


def first_error(log: str) -> str | None:
    """Find the line to show; the ones after it are often its consequences.

    >>> first_error("pump.cu(1): warning: old\\npump.cu(7): error: no such thing\\n  x\\n")
    'pump.cu(7): error: no such thing'
    """
    return next((line.strip() for line in log.splitlines() if _ERROR.search(line)), None)


def kernel_uses(log: str) -> tuple[KernelUse, ...]:
    """Read what ptxas says of each kernel, by name.

    >>> [use] = kernel_uses('''ptxas info    : Compiling entry function 'pump' for 'sm_90'
    ... ptxas info    : Function properties for pump
    ... ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
    ... ptxas info    : Used 96 registers, used 3 barriers, 224 bytes smem
    ... ''')
    >>> use.registers, use.shared_bytes, use.stack_bytes, use.spilled_bytes
    (96, 224, 8, 16)
    """
    uses = []
    for part in log.split("Compiling entry function '")[1:]:
        name = part.partition("'")[0]

        def total(unit: str, text: str = part) -> int:
            return sum(map(int, re.findall(rf"(\d+) {unit}", text)))

        use = KernelUse(
            name=name,
            registers=total("registers"),
            shared_bytes=total("bytes smem"),
            stack_bytes=total("bytes stack frame"),
            spilled_bytes=total("bytes spill"),
        )
        uses.append(use)
    return tuple(sorted(uses, key=lambda use: use.name))
