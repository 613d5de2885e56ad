"""All checks of a host, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from tccl_py.health.host import SEVERITIES, Finding, Host, Unseen
from tccl_py.health.links import check_acs, check_gpus, check_iommu, check_links, check_peers
from tccl_py.health.memory import check_limits, check_numa, check_shared_memory, check_virtual
from tccl_py.health.settings import check_nccl, check_own_rings, check_settings

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
