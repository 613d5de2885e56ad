"""Compiling the kernels with NVRTC, NVIDIA's compiler as a library; no GPU and no cupy is needed.

The profiler itself compiles through cupy, on a GPU's host; here it is shown that every GPU that is
supported gets its kernels, and what they take.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from importlib import metadata
from pathlib import Path

import msgspec

OPTIONS = ("--std=c++17", "--ptxas-options=-v")  # -v puts what each kernel needs into the log


class KernelUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one kernel takes of a multiprocessor, functions that it calls included."""

    name: str
    registers: int
    """A thread's."""
    stack_bytes: int
    """A thread's, in local memory."""
    spilled_bytes: int
    """Of registers stored to and loaded from local memory, counted in the code."""


def find_nvrtc(major: int) -> Path | None:
    """The NVRTC of a CUDA version in wheels: up to 12 a wheel's name has the version."""
    for wheel in (f"nvidia-cuda-nvrtc-cu{major}", "nvidia-cuda-nvrtc"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.distribution(wheel).files or ():
                if file.name == f"libnvrtc.so.{major}":
                    return Path(str(file.locate()))
    return None


def compile_kernels(source: str, *, sm: int, library: Path) -> tuple[bytes, str]:
    """The machine code of CUDA C++ for one compute capability, and all that NVRTC said."""
    lib = ctypes.CDLL(str(library))
    _declare(lib)
    # CUDA 13.0's wheel does not look beside itself for what it opens by a bare name.
    for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    program = c_void_p()
    assert not lib.nvrtcCreateProgram(program, source.encode(), b"pump.cu", 0, None, None)

    def result(what: str) -> bytes:
        size = c_size_t()
        assert not getattr(lib, f"nvrtcGet{what}Size")(program, size)
        buffer = ctypes.create_string_buffer(size.value)
        assert not getattr(lib, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture=sm_{sm}")]
    status = lib.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
    # The compiler's part of the log and the assembler's have a NUL between them at times.
    log = result("ProgramLog").decode("utf-8", "replace").replace("\0", "\n").strip()
    assert not status, f"kernels for sm {sm}: {log}"
    code = result("CUBIN")
    lib.nvrtcDestroyProgram(program)
    return code, log


def _declare(lib: ctypes.CDLL) -> None:
    """Argument types of nvrtc.h: without them ctypes would cut pointers to 32 bits."""
    strings = POINTER(c_char_p)
    lib.nvrtcCreateProgram.argtypes = [
        POINTER(c_void_p), c_char_p, c_char_p, c_int, strings, strings,
    ]  # fmt: skip
    lib.nvrtcDestroyProgram.argtypes = [POINTER(c_void_p)]
    lib.nvrtcCompileProgram.argtypes = [c_void_p, c_int, strings]
    for what in ("ProgramLog", "CUBIN"):
        getattr(lib, f"nvrtcGet{what}Size").argtypes = [c_void_p, POINTER(c_size_t)]
        getattr(lib, f"nvrtcGet{what}").argtypes = [c_void_p, c_char_p]


def kernel_uses(log: str) -> dict[str, KernelUse]:
    """What ptxas says of each kernel, by name.

    >>> kernel_uses('''ptxas info    : Compiling entry function 'pump' for 'sm_90'
    ... ptxas info    : Function properties for pump
    ... ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
    ... ptxas info    : Used 96 registers, used 3 barriers, 224 bytes smem
    ... ''')["pump"]
    KernelUse(name='pump', registers=96, stack_bytes=8, spilled_bytes=16)
    """
    uses = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part.partition("'")[0]

        def total(unit: str, text: str = part) -> int:
            return sum(map(int, re.findall(rf"(\d+) {unit}", text)))

        uses[name] = KernelUse(
            name=name,
            registers=total("registers"),
            stack_bytes=total("bytes stack frame"),
            spilled_bytes=total("bytes spill"),
        )
    return uses
