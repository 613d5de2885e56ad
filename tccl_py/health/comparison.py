"""Hosts compared: facts of each that should be equal on all, the odd host, and the odd value.

1. `facts_of` gives a host's facts as text by name; what differs between sound hosts (addresses,
   serial numbers, counters) is no fact.
2. `compare_hosts` groups hosts with equal facts. Of each fact the value of most hosts is the usual
   one; each other value is a difference, with what it does to a job by a rule of `rules.json`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from tccl_py.errors import InputError, require, spell
from tccl_py.files import read_bytes, says
from tccl_py.health.checks import limit_of, redirecting_ports, shared_memory_size, translating
from tccl_py.health.host import (
    SEVERITIES,
    HostState,
    Severity,
    in_force,
    list_names,
    mib,
    rules,
    valid_text,
)
from tccl_py.health.nics import port_name
from tccl_py.model.links import DoctorReport
from tccl_py.nccl.variables import HOST_VARIABLES
from tccl_py.readers.sysfs import rdma_ports

_MAX_BYTES = 8 << 20
_MAX_FACTS, _MAX_TEXT = 5000, 4000
_OWN = ("NCCL_HOSTID", "NCCL_COMM_ID", "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE")
"""Variables that each host, or each rank, has its own value of."""
_BOOT = re.compile(r"(?:iommu|amd_iommu|intel_iommu|pci|pcie_\w+|nokaslr|mitigations|numa\w*)\b")
_LIBRARIES = ("libibverbs.so.1", "libmlx5.so.1", "libnccl-net.so")
_ABSENT = ("variable", "library")
"""Facts that a host lacks where it has no other; else a missing fact could not be read."""


def facts_of(host: HostState) -> dict[str, str]:
    """Return what of a host should be equal on all hosts of a cluster: text by name.

    A name begins with the kind of fact, which decides what a difference does.
    """
    facts = {name: text for name, text in _facts(host) if text}
    return {valid_text(name)[:200]: valid_text(text)[:_MAX_TEXT] for name, text in facts.items()}


def _facts(host: HostState) -> Iterator[tuple[str, str]]:
    yield "driver", host.driver_version()
    yield "kernel", host.kernel()
    options = [word for word in host.text("proc/cmdline").split() if _BOOT.match(word)]
    yield "kernel options", " ".join(sorted(options))
    yield "BIOS", host.text("sys/class/dmi/id/bios_version")
    yield "machine", host.text("sys/class/dmi/id/product_name")
    if host.nccl is not None:
        yield "NCCL", ", ".join(dict.fromkeys(nccl.version for nccl in host.nccl)) or "none"
    for name, line in in_force(host).items():
        if name.startswith(("NCCL_", "TCCL_")) and name not in _OWN:
            place = line.where.rpartition(":")[0] or line.where
            yield f"variable {name}", f"{line.value} ({place})"
    for name in _LIBRARIES:
        path = host.library(name)
        yield f"library {name}", path.name if path else ""
    yield from _facts_of_gpus(host)
    yield from _facts_of_nics(host)
    for text, name in (("Max locked memory", "locked memory"), ("Max open files", "open files")):
        bound = limit_of(host.text("proc/self/limits"), text)
        yield f"limit {name}", str(bound) if bound is not None else "unlimited"
    size = shared_memory_size(host)
    yield "/dev/shm", mib(size) if size is not None else ""
    if host.links is not None and host.links.verdict != "inconclusive":
        yield "proof of links", host.links.verdict


def _facts_of_gpus(host: HostState) -> Iterator[tuple[str, str]]:
    yield "GPUs", str(len(host.gpus))
    named = {gpu.bus_id: gpu for gpu in host.driver.gpus}
    for index, bus_id in enumerate(host.gpus):
        gpu = named.get(bus_id)
        yield f"GPU {index}", gpu.name if gpu else host.pci(bus_id, "device")
        yield f"place of GPU {index}", bus_id
        above = host.ports_above(bus_id)
        # Idle GPUs lower the speed, never the width.
        ends = (host.pci_link(end, "max").speed_gts for end in (bus_id, *above[-1:]))
        speed, width = min(filter(None, ends), default=0), host.pci_link(bus_id, "current").width
        yield f"link of GPU {index}", f"{speed:g} GT/s x{width}" if speed and width else ""
        yield f"NVLinks of GPU {index}", str(sum(gpu.links.values())) if gpu else ""
    if len(host.gpus) > 1:
        without = sum(not fact.supported for fact in host.driver.peer_access)
        yield "pairs without P2P", "" if host.driver.unseen else str(without)
        redirecting, hidden = redirecting_ports(host)
        yield "ACS", "" if hidden else f"redirects at {len(redirecting)} bridges"
        translates = translating(host)
        yield "IOMMU", "" if translates is None else f"translates: {translates}".lower()


def _facts_of_nics(host: HostState) -> Iterator[tuple[str, str]]:
    ports = rdma_ports(host)
    names = {port: port_name(port, ports) for port in ports}
    yield "NICs", " ".join(names[port] for port in ports) or "none"
    for port, name in names.items():
        yield f"state of {name}", port.state
        yield f"rate of {name}", f"{port.mbps / 1000:g} Gbit/s" if port.active else ""
        yield f"MTU of {name}", str(port.mtu or "") if port.ethernet else ""
        link = host.pci_link(port.bus_id, "current")
        yield f"link of {name}", f"{link.speed_gts:g} GT/s x{link.width}" if link.gbps else ""
        kinds = (
            f"{gid.index} {gid.version}{' link-local' * gid.address.is_link_local}"
            for gid in port.gids
        )
        yield f"addresses of {name}", ", ".join(kinds) if port.ethernet else ""
    if ports and host.gpus:
        yield "GPU Direct RDMA", "offered" if host.offers_gpu_memory() else "not offered"


_OF_A_HOST = (
    *HOST_VARIABLES,
    *("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_TOPO_FILE", "NCCL_GRAPH_FILE"),
)
"""Variables that hosts may well have unlike values of."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A value that some hosts have of a fact, and most have not."""

    severity: Severity
    what: str
    """The fact."""
    value: str
    """"none" where the hosts lack it."""
    hosts: tuple[str, ...]
    usual: str
    """What most hosts have; "" where no value is that of most."""
    of: int
    """The hosts that have the usual value."""
    why: str
    source: str
    fix: str


class HostsCompared(msgspec.Struct, frozen=True, kw_only=True):
    """What hosts have in common, and what not."""

    hosts: int
    groups: tuple[tuple[str, ...], ...]
    """Hosts with equal facts, the largest group first."""
    differences: tuple[Difference, ...]
    """The worst first; of equal ones that of the fewest hosts."""
    reports: Annotated[tuple[DoctorReport, ...] | UnsetType, says("of each host of a job")] = UNSET

    @property
    def healthy(self) -> bool:
        """True if no difference hangs or slows a job."""
        return all(one.severity == "note" for one in self.differences)


def read_reports(paths: Sequence[Path]) -> list[DoctorReport]:
    """Read what `tccl doctor --json` wrote on each host.

    Raises InputError: unreadable, no such file, a name twice, or fewer than two.
    """
    hosts: dict[str, Path] = {}
    facts = []
    for path in paths:
        try:
            one = msgspec.json.decode(read_bytes(path, limit=_MAX_BYTES), type=DoctorReport)
        except msgspec.MsgspecError as error:
            right = "give what `tccl doctor --json` printed on a host"
            raise InputError(str(path), "has no facts of a host", right) from error
        fault = f"is of {one.host[:80]!r}, as {hosts.get(one.host)} is"
        require(one.host not in hosts, str(path), fault, "give one file a host")
        require(
            len(one.facts) <= _MAX_FACTS, str(path), "has too many facts", f"{_MAX_FACTS} at most"
        )
        hosts[one.host] = path
        facts.append(one)
    require(len(facts) > 1, "the files", f"are {len(facts)}", "give those of two hosts or more")
    return facts


def compare_hosts(hosts: Sequence[DoctorReport]) -> HostsCompared:
    """Find the hosts that are not as most are, and the facts that tell them apart."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for one in hosts:
        alike[tuple(sorted(one.facts.items()))].append(one.host)
    names = {name for one in hosts for name in one.facts}
    differences = [found for name in sorted(names) for found in _differences(name, hosts)]
    differences.sort(key=lambda one: (SEVERITIES.index(one.severity), len(one.hosts), one.what))
    groups = sorted(alike.values(), key=lambda group: (-len(group), group))
    return HostsCompared(
        hosts=len(hosts),
        groups=tuple(tuple(sorted(group)) for group in groups),
        differences=tuple(differences),
    )


def _differences(name: str, hosts: Sequence[DoctorReport]) -> Iterator[Difference]:
    users: dict[str, list[str]] = defaultdict(list)
    for one in hosts:
        if (value := one.facts.get(name, "none" * name.startswith(_ABSENT))) != "":
            users[value].append(one.host)
    if len(users) == 1:
        return
    usual = max(users, key=lambda value: len(users[value]))
    if 2 * len(users[usual]) <= sum(map(len, users.values())):
        usual = ""
    kind, _, of_what = name.partition(" ")
    effects = {fact: rule for rule in rules().values() for fact in rule.facts}
    rule = effects.get(name) or effects.get(kind, rules()["differs"])
    if of_what in _OF_A_HOST or of_what.startswith(("NCCL_DEBUG", "TCCL_")):
        rule = rules()["differs"]
    for value, of in users.items():
        if value != usual:
            yield Difference(
                severity=rule.severity,
                what=name,
                value=value,
                hosts=tuple(sorted(of)),
                usual=usual,
                of=len(users.get(usual, ())),
                why=rule.why,
                source=rule.source,
                fix=rule.fix,
            )


def comparison_lines(found: HostsCompared, most: int = 20) -> Iterator[tuple[str, Severity | None]]:
    """Yield the lines of a comparison, each with its severity, `most` differences at most."""
    first, *others = found.groups
    if not others:
        yield f"{spell(found.hosts, 'host')}: all facts are equal", None
        return
    odd = [name for group in others for name in group]
    text = f"{spell(found.hosts, 'host')}: {len(first)} alike, not {list_names(odd)}"
    if len(first) * 2 <= found.hosts:
        groups = "; ".join(f"{len(group)}: {list_names(group)}" for group in found.groups[:6])
        text = f"{spell(found.hosts, 'host')} in {len(found.groups)} groups of equal ones: {groups}"
    yield text, None
    said = set[str]()
    for one in found.differences[:most]:
        usual = f"; {one.of} others: {one.usual}" if one.usual else ""
        why = "" if one.why in said else f" ({one.why})"
        said.add(one.why)
        fix = f"; {one.fix}" if why and one.fix else ""
        yield f"{list_names(one.hosts)}: {one.what} {one.value}{usual}{why}{fix}", one.severity
    if len(found.differences) > most:
        yield f"and {len(found.differences) - most} more differences: --json has all", None


def finding_lines(reports: Sequence[DoctorReport]) -> Iterator[tuple[str, Severity]]:
    """Yield what doctors found on hosts, equal findings once, those that hang first."""
    hosts: dict[tuple[Severity, str], list[str]] = defaultdict(list)
    for report in reports:
        for one in report.findings:
            text = ": ".join(filter(None, (one["what"], one["measured"], one["where"])))
            severity: Severity = "hang" if one["severity"] == "hang" else "slow"
            if one["severity"] != "note":
                hosts[severity, f"{text}; {one['fix']}"].append(report.host)
    for (severity, text), names in sorted(hosts.items()):
        yield f"{list_names(sorted(names))}: {text}", severity
