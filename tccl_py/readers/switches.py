"""Switches between hosts, as SLURM's topology files or as YAML, read into a SwitchTree.

The YAML form:

    switches:                   # all switches, in any order
      - name: leaf1             # required, and used once
        uplink_gbps: 12.5       # of the link above it, each direction, GB/s (10^9 bytes); optional
        hosts: [node1, node2]   # or SLURM's expressions, in quotes: "node[1-2]"; optional
      - name: spine
        switches: [leaf1]       # those below it, by name
      - name: root
        switches:               # or described there and then
          - spine
          - name: leaf9
            hosts: node9        # one is no list
    rails: any                  # or only: NIC i of a host reaches NIC i of another, and no other

Every switch is below one other, or below none. Where several are below none, they are joined by a
switch without a name and without limits. Hosts that are not in the job may be in the file.

All of YAML that stands for something else is refused: anchors and aliases, tags, several documents.
Every name is taken as it is written, so that a host may be called `010` or `no`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import msgspec

from tccl_py.model.cluster import SwitchTree, check_host_name, shown
from tccl_py.model.switches import MAX_NAMES, SwitchLine, joined, restricted
from tccl_py.readers.hosts import compress, expand, read_list
from tccl_py.readers.slurm_topology import (
    Value,
    is_slurm_topology,
    is_slurm_yaml,
    parse_yaml,
    switch_lines,
    yaml_switch_lines,
)

__all__ = [
    "Network",
    "Rails",
    "parse_slurm_topology",
    "parse_switch_yaml",
    "read_switches",
    "restricted",
    "switch_yaml",
]

from tccl_py.model.cluster import Rails

"""Whether NIC i of a host reaches any NIC of another, or NIC i only."""

_RATE = re.compile(r"[0-9]{1,7}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,2})?", re.ASCII)
MAX_RATE_GBPS = 1e6


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about what lies between hosts."""

    switches: SwitchTree
    rails: Rails = "any"


def read_switches(path: Path, hosts: Iterable[str] | None = None) -> Network:
    """Read a topology.conf, a topology.yaml or the YAML form, as suffix or else text say.

    Args:
        path: the file.
        hosts: those of the job; the tree is cut down to them, and each must be in it.

    Raises:
        InputError: the file cannot be read, or is refused as the two parsers say.
    """
    text, where = read_list(path), str(path)
    yaml = path.suffix.lower() in (".yaml", ".yml")
    if not yaml and (path.suffix.lower() == ".conf" or is_slurm_topology(text)):
        return Network(switches=parse_slurm_topology(text, where=where, hosts=hosts))
    return parse_switch_yaml(text, where=where, hosts=hosts)


def parse_slurm_topology(
    text: str, *, where: str, hosts: Iterable[str] | None = None
) -> SwitchTree:
    """The tree of a topology.conf; LinkSpeed is no rate, and uplinks have no limit.

    Raises:
        InputError: a line that is not understood, or switches that are no tree; with `hosts`, one
            that is at no switch.
    """
    return joined(switch_lines(text, where=where), where=where, hosts=hosts)


def parse_switch_yaml(text: str, *, where: str, hosts: Iterable[str] | None = None) -> Network:
    """The network that the YAML form, or SLURM's topology.yaml, describes.

    Raises:
        InputError: not YAML, other fields or values than the form has, or switches that are no
            tree; with `hosts`, one that is at no switch.
    """
    document = parse_yaml(text, where=where)
    if is_slurm_yaml(document):
        lines = yaml_switch_lines(document)
        return Network(switches=joined(lines, where=where, hosts=hosts))
    fields = document.fields("a mapping", "switches", "rails")
    if "switches" not in fields:
        raise document.refused("has no switches", "write switches: and a list of them")
    found = _Found()
    for value in fields["switches"].items("switches"):
        found.switch(value)
    tree = joined(found.lines, where=where, hosts=hosts)
    return Network(switches=tree, rails=_rails(fields.get("rails")))


def switch_yaml(network: Network) -> str:
    """The YAML form of a network, which `parse_switch_yaml` reads back."""
    lines = ["switches:"]
    for switch in network.switches.all_switches:
        if not switch.name:  # the reader joins several roots again
            continue
        lines.append(f'  - name: "{switch.name}"')
        if switch.uplink_gbps is not None:
            lines.append(f"    uplink_gbps: {switch.uplink_gbps!r}")
        if switch.hosts:
            lines.append(f'    hosts: "{compress(switch.hosts)}"')
        if switch.switches:
            lines.append(f'    switches: "{compress(below.name for below in switch.switches)}"')
    return "\n".join([*lines, f"rails: {network.rails}", ""])


@dataclass
class _Found:
    """The switches met so far, and how many names they have."""

    lines: list[SwitchLine] = field(default_factory=list)
    names: int = 0

    def switch(self, value: Value) -> str:
        """Add a switch and those described inside it; its name."""
        fields = value.fields("a switch", "name", "uplink_gbps", "hosts", "switches")
        if "name" not in fields:
            raise value.refused("this switch has no name", "write name: and a name")
        name = check_host_name(fields["name"].text("a name"), where=fields["name"].where)
        place = len(self.lines)
        below: list[str] = []
        for one in _listed(fields.get("switches"), "switches"):
            inline = isinstance(one.content, dict)
            below.extend([self.switch(one)] if inline else self.expanded(one, "a switch"))
        hosts = [
            host
            for one in _listed(fields.get("hosts"), "hosts")
            for host in self.expanded(one, "a host")
        ]
        line = SwitchLine(
            name=name,
            where=value.where,
            hosts=tuple(hosts),
            switches=tuple(below),
            uplink_gbps=_rate(fields.get("uplink_gbps")),
        )
        self.lines.insert(place, line)
        return name

    def expanded(self, value: Value, meaning: str) -> tuple[str, ...]:
        """The names that an expression stands for."""
        expression = value.text(f"{meaning}, or a SLURM expression in quotes,")
        names = expand(expression, where=value.where)
        self.names += len(names)
        if self.names > MAX_NAMES:
            raise value.refused(f"makes it more than {MAX_NAMES} names", "describe one cluster")
        return names


def _listed(value: Value | None, meaning: str) -> list[Value]:
    """The values of a list, none if there is none; one that is no list stands for itself."""
    if value is None:
        return []
    return [value] if isinstance(value.content, str) else value.items(meaning)


def _rate(value: Value | None) -> float | None:
    if value is None:
        return None
    text = value.text("a rate in GB/s")
    rate = float(text) if _RATE.fullmatch(text) else 0.0
    if not 0 < rate <= MAX_RATE_GBPS:
        right = f"a number of GB/s above 0, up to {MAX_RATE_GBPS:.0f}, is needed"
        raise value.refused(f"the rate is {shown(text)}", right)
    return rate


def _rails(value: Value | None) -> Rails:
    if value is None:
        return "any"
    for rails in get_args(Rails):
        if value.content == rails:
            return rails  # type: ignore[no-any-return]
    raise value.refused(f"rails is {value.kind}", "any or only are possible")
