"""Which version of NCCL a measured plan is for: what was asked for, or what is installed."""

from __future__ import annotations

from tccl_py.cli.arguments import notice
from tccl_py.runtimes.nccl.versions import LATEST
from tccl_py.topology.readers.installed_nccl import InstalledNccl, installed_nccl

_OTHER = "--nccl VERSION plans for another"


def version_here(asked: str | None) -> str:
    """The version to plan this machine for; says which it is, and why, if none was asked for."""
    if asked is not None:
        return asked
    found = installed_nccl()
    if found is None:
        return _newest("none was found here")
    notice(f"planned for NCCL {found.minor}: {found.version} is here, {found.source}; {_OTHER}")
    return found.minor


def version_of_hosts(asked: str | None, told: str) -> str:
    """The version to plan a job's hosts for; all told the same, "none" if they have none."""
    if asked is not None:
        return asked
    if told == "none":
        return _newest("the hosts have none that was found")
    found = InstalledNccl(version=told, source="on all hosts")
    notice(f"planned for NCCL {found.minor}: {told} is on all hosts; {_OTHER}")
    return found.minor


def _newest(why: str) -> str:
    notice(f"planned for NCCL {LATEST}, the newest known: {why}; {_OTHER}")
    return LATEST
