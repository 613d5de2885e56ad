"""Which variables of an environment say something else than a plan's settings."""

from __future__ import annotations

from collections.abc import Mapping

from tccl_py.runtimes.nccl.settings import Settings, environment, settings_from_environment

_ALWAYS = (
    "p2p_level",
    "p2p_read",
    "p2p_copy_engine",
    "shm_locality",
    "shm_copy_engine",
    "net_disable_intra",
    "buffsize",
)
_IF_PLANNED = (
    "algo",
    "net_gdr_level",
    "net_gdr_read",
    "cross_nic",
    "ib_hca",
    "ib_gid_index",
    "socket_ifname",
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
