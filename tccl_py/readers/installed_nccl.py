"""Which NCCL programs of this host load: torch's, a package of this Python, or the system's.

torch's wheels need a package that has the library, or have NCCL in their own. The package's version
is the library's, unless two packages share the one file; what only the library knows, a process of
its own asks it, so that neither torch nor anything of CUDA is loaded here.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from tccl_py.children import child_command, child_environment
from tccl_py.limits import limit_reached
from tccl_py.nccl_library import NAME, PACKAGE_PLACE, version_text

_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_NEEDED = re.compile(r"nvidia[-_]nccl[-_]cu[0-9]{1,3}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}(?:\.[0-9]{1,3})?", re.ASCII)
_PATIENCE_S = 60.0
"""To import torch from a cold network file system takes long."""
_TORCH = "torch"
"""Asked for in place of a library."""


class InstalledNccl(msgspec.Struct, frozen=True, kw_only=True):
    """A version of NCCL as its makers write it, and where it is, as part of a sentence."""

    version: str
    source: str

    @property
    def minor(self) -> str:
        """The part that says what NCCL does: two numbers."""
        return ".".join(self.version.split(".")[:2])


def installed_nccl() -> InstalledNccl | None:
    """The NCCL that a job of this Python most likely has; None if none was found."""
    return next(installed_nccls(), None)


def installed_nccls() -> Iterator[InstalledNccl]:
    """Those that were found, the one of torch first; each is looked for when it is asked for."""
    torch = _distribution("torch")
    own = _of_torch(torch) if torch is not None else None
    if own is not None:
        yield own
    elif (package := _of_packages(_PACKAGES)) is not None:
        yield package
    found = _told(NAME)
    if found:
        yield InstalledNccl(version=found, source=f"{NAME} as the system finds it")


def _of_torch(torch: metadata.Distribution) -> InstalledNccl | None:
    """What torch loads; None where it is built without NCCL, or does not say."""
    name = f"torch {torch.version}"
    needed = [
        match[0].replace("_", "-") for one in torch.requires or () if (match := _NEEDED.match(one))
    ]
    package = _of_packages(needed)
    if package is not None:
        return InstalledNccl(
            version=package.version, source=f"{package.source}, which {name} loads"
        )
    if not Path(str(torch.locate_file("torch/lib/libtorch_cuda.so"))).exists():
        return None
    found = _told(_TORCH)
    return InstalledNccl(version=found, source=f"in {name}") if found else None


def _of_packages(names: Sequence[str]) -> InstalledNccl | None:
    """What the first of these packages that is installed has."""
    for name in names:
        package = _distribution(name)
        if package is None:
            continue
        version = package.version
        if sum(_distribution(other) is not None for other in _PACKAGES) > 1:
            # They put the library in one place: whichever came last is there.
            place = package.locate_file(PACKAGE_PLACE / NAME)
            version = _told(str(place)) or version
        match = _NUMBER.match(version)
        if match is not None:
            return InstalledNccl(version=match[0], source=f"of the package {name}")
    return None


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _told(library: str) -> str:
    """Return the version of a library, or of torch's NCCL, by a process of its own; "" if none.

    Raises:
        InputError: no process can be started, because a limit of this one is reached.
    """
    try:
        done = subprocess.run(
            child_command("tccl_py.readers.installed_nccl", library),
            env=child_environment(dict(os.environ)),
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reached = limit_reached(error)
        if reached is not None:
            raise reached from error
        return ""
    match = _NUMBER.fullmatch(done.stdout.strip())
    return match[0] if match is not None and done.returncode == 0 else ""


def _version_of(library: str) -> str:
    """Load a library, or torch, and return the version of NCCL that it says."""
    if library == _TORCH:
        import torch  # noqa: PLC0415 (only in a process of its own)

        return ".".join(map(str, torch.cuda.nccl.version()))
    number = ctypes.c_int()
    if ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number)):
        return ""
    return version_text(number.value)


if __name__ == "__main__":
    print(_version_of(sys.argv[1]))
