"""Variables that all jobs of a host have and that say how far P2P goes: a plan can keep them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tccl_py.errors import InputError
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.nccl.settings import Settings, environment, settings_from_environment
from tccl_py.nccl.versions import Level
from tccl_py.nccl.view import view

KEEPABLE = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
_RIGHT = {
    "NCCL_P2P_DISABLE": "1 would; leave it out otherwise",
    "NCCL_P2P_LEVEL": "a path type would, as SYS, PHB, PIX or LOC; leave it out otherwise",
}


def check_keepable(name: str, *, where: str) -> None:
    """Refuse a variable that no plan can be made under.

    Raises:
        InputError: it is none of KEEPABLE.
    """
    if name not in KEEPABLE:
        what = "is no variable that plans can be made under"
        raise InputError(f"{where} {name[:40]!r}", what, " or ".join(KEEPABLE))


def as_read(variables: Mapping[str, str], *, where: str) -> dict[str, str]:
    """These variables as NCCL reads them, by name, if each of them says how far P2P goes.

    >>> as_read({"NCCL_P2P_LEVEL": "1"}, where="kept")
    {'NCCL_P2P_LEVEL': 'PIX'}

    Raises:
        InputError: another variable, or a value that says nothing to NCCL.
    """
    found = {}
    for name, value in sorted(variables.items()):
        check_keepable(name, where=where)
        level = kept_level({name: value})
        if level is None:
            what = f"is {value[:20]!r}, which says nothing to NCCL"
            raise InputError(f"{where} {name}", what, _RIGHT[name])
        found[name] = "1" if name == "NCCL_P2P_DISABLE" else str(level)
    return found


def kept_level(kept: Mapping[str, str]) -> Level | None:
    """The P2P level that NCCL has by these variables, LOC being none at all; None if by default."""
    return settings_from_environment(kept).p2p_level


def direct_pairs(
    machine: Machine, knowledge: Knowledge, level: Level | None, *, gpus: Sequence[int]
) -> frozenset[tuple[int, int]] | None:
    """Pairs of GPUs between which a level lets bytes go directly; None is all there are."""
    if level is None:
        return None
    seen = view(machine, knowledge, Settings(p2p_level=level), gpus=gpus)
    return frozenset((int(one[1:]), int(other[1:])) for one, other in seen.direct)


def check_kept(kept: Mapping[str, str], under: Iterable[Settings], where: str) -> None:
    """Check what a plan keeps against the settings that it has.

    Raises:
        InputError: a variable that no plan is made under, or settings of another P2P level.
    """
    if not kept:
        return
    if as_read(kept, where=f"{where} kept") != kept:
        raise InputError(f"{where} kept", "has values that no plan has", "plan it again")
    level = kept_level(kept)
    for settings in under:
        if settings.p2p_level != level:
            what = f"is for jobs with {kept_words(kept)} and has p2p_level {settings.p2p_level}"
            raise InputError(where, what, f"it is {level} there; plan it again")


def kept_words(kept: Mapping[str, str]) -> str:
    """The variables as a shell has them.

    >>> kept_words({"NCCL_P2P_DISABLE": "1"})
    'NCCL_P2P_DISABLE=1'
    """
    return " ".join(f"{name}={value}" for name, value in kept.items())


def kept_text(kept: Mapping[str, str]) -> str:
    """For which jobs a plan is.

    >>> kept_text({"NCCL_P2P_DISABLE": "1"})
    "for jobs that have NCCL_P2P_DISABLE=1, stock NCCL's too"
    """
    return f"for jobs that have {kept_words(kept)}, stock NCCL's too"


# Which variables of an environment say something else than a plan's settings.


_ALWAYS = (
    "p2p_level",
    "p2p_read",
    "p2p_copy_engine",
    "shm_locality",
    "shm_copy_engine",
    "shm_disable",
    "net_disable_intra",
    "buffsize",
)
_IF_PLANNED = (
    "min_channels",
    "max_channels",
    "algo",
    "net_gdr_level",
    "net_gdr_read",
    "cross_nic",
    "ib_hca",
    "ib_gid_index",
    "socket_ifname",
    "socket_threads",
    "sockets_per_thread",
)
"""Settings that change which transfers a ring makes; the others only if the plan chose them."""


def against(settings: Settings, given: Mapping[str, str]) -> tuple[str, ...]:
    """Names of variables with which an environment says something else than these settings.

    >>> against(Settings(p2p_level="SYS"), {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"})
    ('NCCL_P2P_DISABLE',)
    """
    wanted = environment(settings)
    if not _differing(settings, {**wanted, **given}):
        return ()
    named = [
        name
        for name in sorted(given)
        if name.startswith("NCCL_") and _differing(settings, {**wanted, name: given[name]})
    ]
    return tuple(named) or ("its NCCL variables",)


def _differing(settings: Settings, variables: Mapping[str, str]) -> list[str]:
    found = settings_from_environment(
        variables, version=settings.version, channels=settings.channels
    )
    default = Settings()
    planned = [one for one in _IF_PLANNED if getattr(settings, one) != getattr(default, one)]
    return [one for one in (*_ALWAYS, *planned) if getattr(found, one) != getattr(settings, one)]
