"""All checks of a host, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from tccl_py.health.doctor.acs import check_acs, check_iommu
from tccl_py.health.doctor.findings import SEVERITIES, Finding, Unseen
from tccl_py.health.doctor.gpus import check_gpus
from tccl_py.health.doctor.host import Host
from tccl_py.health.doctor.links import check_links, check_peers
from tccl_py.health.doctor.memory import check_limits, check_shared_memory
from tccl_py.health.doctor.nccl import check_nccl, check_own_rings
from tccl_py.health.doctor.numa import check_numa, check_virtual
from tccl_py.health.doctor.settings import check_settings

CHECKS: tuple[Callable[[Host], Iterator[Finding | Unseen]], ...] = (
    check_acs,
    check_iommu,
    check_links,
    check_peers,
    check_gpus,
    check_numa,
    check_shared_memory,
    check_limits,
    check_settings,
    check_nccl,
    check_own_rings,
    check_virtual,
)


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Findings, the worst first, and what could not be seen."""

    findings: tuple[Finding, ...]
    unseen: tuple[Unseen, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that hangs or slows NCCL."""
        return all(finding.severity == "note" for finding in self.findings)


def examine(host: Host) -> Diagnosis:
    """Look at everything; nothing is changed."""
    said = [one for check in CHECKS for one in check(host)]
    findings = [one for one in said if isinstance(one, Finding)]
    return Diagnosis(
        findings=tuple(sorted(findings, key=lambda one: SEVERITIES.index(one.severity))),
        unseen=tuple(one for one in said if isinstance(one, Unseen)),
    )
