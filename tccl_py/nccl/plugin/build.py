"""Build the plugin: a plain shared library, by a C compiler with glibc's headers and nothing else.

`python -m tccl_py.nccl.plugin.build FOLDER` writes libnccl-env-tccl.so to a folder, for hosts
without Python too. setup.py runs this file where tccl_py's dependencies are not installed yet, so
it uses the standard library alone, beside its own package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tccl_py.nccl.plugin import LIBRARY

SOURCES = Path(__file__).resolve().parent
FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
    # NCCL closes the library at exit, while its threads may still ask (plugin/env.cc of 2.28.9).
    "-Wl,-z,nodelete,-z,relro,-z,now",
)
# Before glibc 2.34 these are libraries of their own, with the same symbols.
LIBRARIES = ("-Wl,--no-as-needed", "-l:libdl.so.2", "-l:libpthread.so.0")


class BuildError(RuntimeError):
    """There is no plugin: no compiler, or one that fails."""


def build_plugin(folder: Path, *, flags: Sequence[str] = (), name: str = LIBRARY) -> Path:
    """Return the library in a folder, compiled where a source is newer; else BuildError."""
    target = folder / name
    parts = [*sorted(SOURCES.glob("*.c")), *sorted(SOURCES.glob("*.h")), Path(__file__)]
    newest = max(part.stat().st_mtime for part in parts)
    if target.exists() and target.stat().st_mtime > newest:
        return target
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise BuildError("no C compiler: install gcc, or set CC")
    folder.mkdir(parents=True, exist_ok=True)
    # Programs may have the old library open; a rename leaves it to them.
    fresh = folder / f".{name}.{os.getpid()}"
    sources = [str(part) for part in parts if part.suffix == ".c"]
    command = [compiler, *FLAGS, *flags, "-o", str(fresh), *sources, *LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        fresh.unlink(missing_ok=True)
        raise BuildError(f"{compiler} fails: {done.stderr[-2000:]}")
    fresh.replace(target)
    return target


def main() -> None:
    """Build the library in the folder that is named, and print its path."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m tccl_py.nccl.plugin.build FOLDER")
    try:
        print(build_plugin(Path(sys.argv[1])))
    except BuildError as error:
        sys.exit(f"tccl: {error}")


if __name__ == "__main__":
    main()
