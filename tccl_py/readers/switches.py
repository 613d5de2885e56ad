"""Switches between hosts, from SLURM's topology.conf or the YAML form, as a SwitchTree.

The YAML form:

    switches:                   # all switches, in any order
      - name: leaf1             # required, and used once
        uplink_gbps: 12.5       # of the link above, each direction, GB/s (10^9 bytes); optional
        hosts: [node1, node2]   # or SLURM's expressions, in quotes: "node[1-2]"; optional
      - name: spine
        switches: [leaf1]       # the switches below, by name
      - name: root
        switches:               # or described there and then
          - spine
          - name: leaf9
            hosts: node9        # a single host needs no list
    rails: any                  # or only: NIC i of a host reaches NIC i of any host, no other NIC

Every switch is below at most one switch. Several uppermost switches are joined by a switch without
name and limit. The file may have hosts outside the job.

Refused parts of YAML are anchors and aliases, tags, and several documents. Names are plain texts: a
host may be called `010` or `no`. SLURM's file follows topology.conf(5) and
src/common/parse_config.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from tccl_py.errors import InputError
from tccl_py.files import read_text
from tccl_py.model.cluster import (
    MAX_HOSTS,
    Rails,
    SwitchTree,
    check_host_name,
    check_hosts_once,
    shown,
)
from tccl_py.model.reports import restricted
from tccl_py.readers.hosts import MAX_BYTES, expand

MAX_SWITCHES = 65_536
MAX_LEVELS = 32
MAX_NAMES = 2 * MAX_HOSTS  # Below the switches of one file, all together
MAX_DEPTH = 64
MAX_VALUES = 500_000

_PAIR = re.compile(r"\s*(?P<key>[A-Za-z0-9_.]+)\s*=\s*(?:\"(?P<quoted>[^\"]*)\"|(?P<plain>\S+))")
_KEYS = ("switchname", "nodes", "switches", "linkspeed")
_RIGHT = "a line is SwitchName=NAME with Nodes=LIST or Switches=LIST"
_FIRST = re.compile(r"^\s*(switchname|blockname)\s*=", re.IGNORECASE | re.MULTILINE)

_Text = Annotated[str, msgspec.Meta(min_length=1)]


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """The switches between hosts, and the reach of NICs."""

    switches: SwitchTree
    rails: Rails = "any"


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """A switch of a file, the switches below by name; `where` is the place in the file."""

    name: str
    where: str
    hosts: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    uplink_gbps: float | None = None


def read_switches(path: Path, hosts: Iterable[str] | None = None) -> Network:
    """Read a topology.conf or the YAML form, as suffix or else text say.

    Args:
        path: the file.
        hosts: the job's hosts; the tree is cut down to them, and each must be in it.

    Raises InputError: the file cannot be read, or as the two parsers.
    """
    text, where = read_text(path, limit=MAX_BYTES), str(path)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    if not is_yaml and (path.suffix.lower() == ".conf" or _FIRST.search(text)):
        return Network(switches=parse_slurm_topology(text, where=where, hosts=hosts))
    return parse_switch_yaml(text, where=where, hosts=hosts)


def parse_slurm_topology(
    text: str, *, where: str, hosts: Iterable[str] | None = None
) -> SwitchTree:
    """Return the tree of a topology.conf; LinkSpeed has no unit, so uplinks have no limit."""
    lines = (_slurm_line(_pairs(content, place), place) for place, content in _lines(text, where))
    return _joined(lines, where=where, hosts=hosts)


def parse_switch_yaml(text: str, *, where: str, hosts: Iterable[str] | None = None) -> Network:
    """Return the network of the YAML form."""
    document = _plain_yaml(text, where)
    try:
        form = msgspec.convert(document, _Switches, strict=False)
    except msgspec.ValidationError as error:
        what, _, path = ascii(str(error))[1:-1][:200].partition(" - at `$")
        place = f"{where} {path.strip('.`')}".strip()
        right = "write switches: and a list of them, each with name: and hosts: or switches:"
        raise InputError(place, f"is of another form ({what})", right) from error
    described = enumerate(form.switches)
    lines = (line for i, switch in described for line in _flat(switch, f"{where} switches[{i}]"))
    return Network(switches=_joined(lines, where=where, hosts=hosts), rails=form.rails)


class _Switch(msgspec.Struct, forbid_unknown_fields=True):
    """A switch of the YAML form."""

    name: _Text
    uplink_gbps: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    hosts: _Text | list[_Text] = []
    switches: _Text | list[_Text | _Switch] = []


class _Switches(msgspec.Struct, forbid_unknown_fields=True):
    """A document of the YAML form."""

    switches: list[_Switch]
    rails: Rails = "any"


class _Loader(getattr(yaml, "CBaseLoader", yaml.BaseLoader)):  # type: ignore[misc]
    """A loader that leaves every scalar a text, and refuses doubled fields."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a name is needed", problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"{shown(key.value)} is there twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _plain_yaml(text: str, where: str) -> Any:
    try:
        _check_events(text, where)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        right = "correct it there; a name with brackets wants quotes"
        raise InputError(place, f"is not YAML ({error.problem})", right) from error
    except yaml.YAMLError as error:
        raise InputError(where, "has characters not allowed in YAML", "save it as text") from error


def _check_events(text: str, where: str) -> None:
    depth = documents = 0
    # Events come one by one, so that what is too deep or too much is never read whole.
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        place = f"{where}:{event.start_mark.line + 1}"
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise InputError(place, "has an anchor or alias", "write the value out")
        if getattr(event, "tag", None) is not None:
            raise InputError(place, f"has the tag {shown(event.tag)}", "leave it out")
        if depth > MAX_DEPTH or count > MAX_VALUES or documents > 1:
            what = "has several documents" if documents > 1 else "is too deep or too long"
            raise InputError(place, what, "describe the switches of one cluster")


def _flat(switch: _Switch, where: str) -> Iterator[_Line]:
    """Yield a switch, and then the switches described inside it."""
    below = [switch.switches] if isinstance(switch.switches, str) else switch.switches
    texts = (child if isinstance(child, str) else child.name for child in below)
    yield _Line(
        name=check_host_name(switch.name, where=where),
        where=where,
        hosts=_expanded([switch.hosts] if isinstance(switch.hosts, str) else switch.hosts, where),
        switches=_expanded(texts, where),
        uplink_gbps=switch.uplink_gbps,
    )
    for i, child in enumerate(below):
        if isinstance(child, _Switch):
            yield from _flat(child, f"{where}.switches[{i}]")


def _expanded(expressions: Iterable[str], where: str) -> tuple[str, ...]:
    names: list[str] = []
    for expression in expressions:
        names += expand(expression, where=where)
        if len(names) > MAX_NAMES:
            raise _too_many(where)
    return tuple(names)


def _too_many(where: str) -> InputError:
    return InputError(where, f"makes it more than {MAX_NAMES} names", "describe one cluster")


def _lines(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield each line's place and content: comments cut, lines that end in a backslash joined."""
    begun: list[str] = []
    start = 1
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        start = start if begun else number
        content = re.sub(r"(?<!\\)#.*", "", line.rstrip("\r")).rstrip()
        begun.append(content.removesuffix("\\"))
        if content.endswith("\\"):
            continue
        whole = " ".join(begun).strip()
        begun.clear()
        if whole:
            yield f"{where}:{start}", whole


def _pairs(content: str, place: str) -> dict[str, str]:
    """Return the values of a line by their keys, in small letters."""
    pairs: dict[str, str] = {}
    at = 0
    while at < len(content):
        match = _PAIR.match(content, at)
        if match is None:
            raise InputError(place, f"{shown(content[at:].strip())} is not understood", _RIGHT)
        key = match["key"].lower()
        if key not in _KEYS:
            blocks = " (topology/block is no tree of switches)" if key == "blockname" else ""
            raise InputError(place, f"{shown(match['key'])} is unknown{blocks}", _RIGHT)
        if key in pairs:
            raise InputError(place, f"{shown(match['key'])} is there twice", "once is right")
        pairs[key] = match["plain"] or match["quoted"] or ""
        at = match.end()
    return pairs


def _slurm_line(pairs: dict[str, str], place: str) -> _Line:
    if not pairs.get("switchname"):
        raise InputError(place, "has no SwitchName", _RIGHT)
    name = check_host_name(pairs["switchname"], where=place)
    if "nodes" in pairs and "switches" in pairs:
        raise InputError(place, f"switch {name} has both nodes and switches", "one is right")
    if not re.fullmatch(r"[0-9]{1,10}", pairs.get("linkspeed", "1"), re.ASCII):
        raise InputError(place, f"LinkSpeed is {shown(pairs['linkspeed'])}", "it is a whole number")
    return _Line(
        name=name,
        where=place,
        hosts=expand(pairs.get("nodes", ""), where=place),
        switches=expand(pairs.get("switches", ""), where=place),
    )


def _joined(lines: Iterable[_Line], *, where: str, hosts: Iterable[str] | None) -> SwitchTree:
    """Return the tree of all these switches, or of the switches above `hosts`."""
    by_name: dict[str, _Line] = {}
    names = 0
    for line in lines:
        names += len(line.hosts) + len(line.switches)
        if names > MAX_NAMES:
            raise _too_many(line.where)
        if line.name in by_name:
            what = f"switch {shown(line.name)} is also at {by_name[line.name].where}"
            raise InputError(line.where, what, "describe each switch once")
        by_name[line.name] = line
        if len(by_name) > MAX_SWITCHES:
            raise InputError(where, "has too many switches", f"at most {MAX_SWITCHES} are read")
    if not by_name:
        raise InputError(where, "has no switch", "describe one at least")
    above = _above(by_name)
    tops = tuple(_tree(by_name, name, 1) for name in by_name if name not in above)
    hanging = {switch.name for top in tops for switch in top.all_switches}
    for name in (name for name in by_name if name not in hanging):
        what = f"switch {shown(name)} is below itself, or below such a switch"
        raise InputError(by_name[name].where, what, "every switch hangs from a root")
    tree = tops[0] if len(tops) == 1 else SwitchTree(name="", switches=tops)
    if hosts is not None:
        return restricted(tree, hosts, where=where)
    check_hosts_once(tree, set(tree.all_hosts), where)
    return tree


def _above(by_name: dict[str, _Line]) -> dict[str, str]:
    above: dict[str, str] = {}
    for line in by_name.values():
        for name in line.switches:
            if name not in by_name:
                raise InputError(line.where, f"there is no switch {shown(name)}", "describe it")
            if name in above:
                what = f"switch {shown(name)} is also below {shown(above[name])}"
                raise InputError(line.where, what, "a switch is below one other at most")
            above[name] = line.name
    return above


def _tree(by_name: dict[str, _Line], name: str, level: int) -> SwitchTree:
    line = by_name[name]
    if level > MAX_LEVELS:
        what = f"switch {shown(name)} is below {MAX_LEVELS} others or more"
        raise InputError(line.where, what, f"at most {MAX_LEVELS} levels are read")
    below = tuple(_tree(by_name, switch, level + 1) for switch in line.switches)
    return SwitchTree(name=name, hosts=line.hosts, switches=below, uplink_gbps=line.uplink_gbps)
