"""The table of checks of a host, and its diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from tccl_py.health.host import SEVERITIES, Finding, Host, Unseen
from tccl_py.health.links import check_acs, check_gpus, check_iommu, check_links, check_peers
from tccl_py.health.memory import (
    check_container,
    check_limits,
    check_numa,
    check_shared_memory,
    check_virtual,
)
from tccl_py.health.settings import check_nccl, check_own_rings, check_settings

CHECKS: Mapping[str, Callable[[Host], Iterator[Finding | Unseen]]] = {
    "acs": check_acs,
    "iommu": check_iommu,
    "links": check_links,
    "peers": check_peers,
    "gpus": check_gpus,
    "numa": check_numa,
    "shared memory": check_shared_memory,
    "limits": check_limits,
    "settings": check_settings,
    "nccl": check_nccl,
    "nccl-rings": check_own_rings,
    "container": check_container,
    "virtual machine": check_virtual,
}


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Findings, the worst first, and facts that could not be read."""

    findings: tuple[Finding, ...]
    unseen: tuple[Unseen, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that hangs or slows NCCL."""
        return all(finding.severity == "note" for finding in self.findings)


def examine(host: Host) -> Diagnosis:
    """Run all checks; nothing is changed."""
    found = [
        msgspec.structs.replace(result, check=name)
        for name, check in CHECKS.items()
        for result in check(host)
    ]
    findings = [result for result in found if isinstance(result, Finding)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    unseen = tuple(result for result in found if isinstance(result, Unseen))
    return Diagnosis(findings=tuple(findings), unseen=unseen)
