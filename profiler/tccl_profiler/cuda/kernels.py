"""The measuring kernels, as source and as loaded for a GPU."""

from __future__ import annotations

from importlib import resources
from typing import Any

NAMES = ("pump", "pump_check", "echo", "stamp")
SOURCE_NAME = "pump.cu"
OPTIONS = ("-std=c++17",)


def kernel_source() -> str:
    """CUDA C++ of all kernels, as installed with this package."""
    return resources.files(__package__).joinpath(SOURCE_NAME).read_text("utf-8")


def load_kernels(cupy: Any) -> dict[str, Any]:
    """All kernels by name for the current GPU; compiled once, cupy keeps the result on disk."""
    module = cupy.RawModule(code=kernel_source(), options=OPTIONS)
    return {name: module.get_function(name) for name in NAMES}
