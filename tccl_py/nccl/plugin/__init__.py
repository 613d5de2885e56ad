"""The NCCL plugin: a C library that gives each communicator the graph file of its GPUs."""

from __future__ import annotations

from pathlib import Path

LIBRARY = "libnccl-env-tccl.so"
INSTALLED = Path(__file__).resolve().parent
"""Where installing tccl-py puts the library, if there is a C compiler."""


def found_library(*folders: Path) -> Path | None:
    """Return the installed library, else the first that was built in these folders, or None."""
    return next(filter(Path.is_file, (folder / LIBRARY for folder in (INSTALLED, *folders))), None)
