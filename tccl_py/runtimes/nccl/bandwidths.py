"""The constants from which NCCL models a machine, in GB/s; they are NCCL's beliefs, not rates.

Source: topo.h and topo.cc of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Sequence

from tccl_py.runtimes.nccl.versions import GraphRules
from tccl_py.topology.machine import NumaNode, PciLink

LOCAL_GBPS = 5000.0
C2C_GBPS = 44.712
"""One C2C link as Grace Hopper's topology files state it; a Machine holds only their count."""
DEFAULT_NET_MBPS = 10000
MBPS_PER_GBPS = 8000.0
DEFAULT_WIDTH = 16

_PCI_LANE = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
"""GT/s -> what NCCL counts a lane as, in 100 Mb/s (80 of them are 1 GB/s)."""
_DEFAULT_LANE = 60

_NVLINK = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (70, 20.0), (60, 18.0))
"""From this sm on, one NVLink's GB/s; older or unknown counts as sm 80."""
_DEFAULT_NVLINK = 20.0

_INTEL_FAMILY = 6
_INTEL = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))
"""From this model on, GB/s between sockets: Emerald Rapids, Sapphire Rapids, Skylake."""
_INTEL_OLD = 6.0
_AMD = 16.0
_ZHAOXIN = ("CentaurHauls", "  Shanghai  ")
_ZHAOXIN_YONGFENG = (7, 0x5B)
_POWER = 32.0
_ARM = 6.0

_INTRA = (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0)
_INTER = (48.0, 30.0, 28.0, 24.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0)
_SLOW_NET = (2.4, 1.2, 0.24, 0.12)
_INTRA_90 = (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0)
_INTER_90 = (48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0)
_INTRA_100 = (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0)
_INTER_100 = (96.0, 86.0, 80.0, 48.0, 45.1, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0,
              6.0, 3.0)  # fmt: skip


def pci_gbps(link: PciLink) -> float:
    """A PCI link by NCCL's table; an unknown speed counts as 8 GT/s, an unknown width as 16.

    >>> pci_gbps(PciLink(speed_gts=32.0)), pci_gbps(PciLink(speed_gts=8.0, width=8))
    (48.0, 6.0)
    """
    lane = _PCI_LANE.get(link.speed_gts or 0.0, _DEFAULT_LANE)
    return (link.width or DEFAULT_WIDTH) * lane / 80.0


def nvlink_gbps(sm: int | None) -> float:
    """One NVLink of a GPU of this sm."""
    for first, gbps in _NVLINK:
        if (sm or 0) >= first:
            return gbps
    return _DEFAULT_NVLINK


def between_cpus_gbps(node: NumaNode) -> float:
    """What leaves this NUMA node for another, by architecture, vendor, family and model."""
    if node.arch.startswith("ppc"):
        return _POWER
    if node.arch.startswith(("arm", "aarch")):
        return _ARM
    if node.vendor == "GenuineIntel":
        return _intel(node.family, node.model)
    if node.vendor == "AuthenticAMD":
        return _AMD
    if node.vendor in _ZHAOXIN:
        return 9.0 if (node.family, node.model) == _ZHAOXIN_YONGFENG else 6.0
    return LOCAL_GBPS


def _intel(family: int | None, model: int | None) -> float:
    if family == _INTEL_FAMILY:
        for first, gbps in _INTEL:
            if (model or 0) >= first:
                return gbps
    return _INTEL_OLD


def speeds(sm: int, *, nodes: int, rules: GraphRules) -> Sequence[float]:
    """Return the rates of a channel that the search tries, fastest first (search.cc)."""
    if nodes == 1:
        if sm < 100:
            return _INTRA_90 if sm >= 90 else _INTRA
        return tuple(rate for rate in _INTRA_100 if rate != 45.0 or rules.more_sm100_rates)
    table = _INTER_100 if sm >= 100 else _INTER_90 if sm >= 90 else _INTER
    new = {86.0: rules.rate_86, 80.0: rules.rate_80}
    return tuple(rate for rate in table if new.get(rate, True)) + _SLOW_NET
