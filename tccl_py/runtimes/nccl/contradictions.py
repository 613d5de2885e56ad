"""Which variables of an environment say something else than a plan's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePosixPath

from tccl_py.runtimes.nccl.settings import Settings, environment, settings_from_environment

TOPOLOGY_VARIABLE = "NCCL_TOPO_FILE"
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


def other_topology(planned: PurePosixPath | None, given: Mapping[str, str]) -> tuple[str, ...]:
    """NCCL_TOPO_FILE, if an environment names another file than a plan's own.

    By another description NCCL moves other bytes by other mechanisms than the plan was made and
    verified with. A plan without a file was made for what NCCL sees by itself on its host, and the
    host's own file, as virtual machines have one, is left to it.

    >>> other_topology(PurePosixPath("/plan/nccl/topo.xml"), {"NCCL_TOPO_FILE": "/etc/topo.xml"})
    ('NCCL_TOPO_FILE',)
    """
    named = given.get(TOPOLOGY_VARIABLE, "")
    if planned is None or not named or os.path.realpath(named) == os.path.realpath(planned):
        return ()
    return (TOPOLOGY_VARIABLE,)


def _differing(settings: Settings, variables: Mapping[str, str]) -> list[str]:
    found = settings_from_environment(
        variables, version=settings.version, channels=settings.channels
    )
    default = Settings()
    planned = [one for one in _IF_PLANNED if getattr(settings, one) != getattr(default, one)]
    return [one for one in (*_ALWAYS, *planned) if getattr(found, one) != getattr(settings, one)]
