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
    rails: any                  # or only: NIC i of a host reaches NIC i of any host, no other NIC;
                                # or NICs by rail (tccl_py.readers.cables)

SLURM's own topology.yaml is read as well: of its topologies the default one, or the only one, which
must be a tree.

Every switch is below at most one switch. Several uppermost switches are joined by a switch without
name and limit. The file may have hosts outside the job. Hosts that are joined without a switch have
`cables:` instead (`tccl_py.readers.cables`).

Refused parts of YAML are anchors and aliases, tags, and several documents. Names are plain texts: a
host may be called `010` or `no`. SLURM's file follows topology.conf(5) and
src/common/parse_config.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from tccl_py.errors import InputError, check_type, require
from tccl_py.files import read_text
from tccl_py.model.cluster import (
    MAX_HOSTS,
    Rails,
    SwitchTree,
    check_host_name,
    check_hosts_once,
    shown,
)
from tccl_py.model.reports import restrict
from tccl_py.readers.cables import Ports, describe_cables
from tccl_py.readers.hosts import MAX_BYTES, expand

MAX_LEVELS = 32
MAX_NAMES = 2 * MAX_HOSTS  # Switches, and names below the switches, of one file
MAX_DEPTH = 64
MAX_VALUES = 500_000
_TOO_MUCH = ("is too deep or too long", "describe the switches of a cluster")

_FORMS = {
    ".cables": "write cables: [[HOST:PORT, HOST:PORT], ...]",
    ".ports": "write ports: {PORT: [NIC, ...], ...}",
    ".rails": "any or only is right, or the NICs on each rail: {first: [mlx5_0], ...}",
    ".uplink_gbps": "give GB/s above 0, as 12.5",
    "": "write switches: and a list of them, each with name: and hosts: or switches:; or cables: "
    "[[HOST:PORT, HOST:PORT], ...]",
}

_PAIR = re.compile(r"\s*(?P<key>[A-Za-z0-9_.]+)\s*=\s*(?:\"(?P<quoted>[^\"]*)\"|(?P<plain>\S+))")
_KEYS = ("switchname", "nodes", "switches", "linkspeed")
_RIGHT = "a line is SwitchName=NAME with Nodes=LIST or Switches=LIST"
_FIRST = re.compile(r"^\s*(switchname|blockname)\s*=", re.IGNORECASE | re.MULTILINE)

_Loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Part = tuple[str, SwitchTree, tuple[str, ...]]
"""The place of a switch in a file, the switch with its hosts, and the switches below by name."""


class Interconnect(msgspec.Struct, frozen=True, kw_only=True):
    """The switches between hosts and the reach of NICs, or the cables in their place."""

    switches: SwitchTree | None
    rails: Rails = "any"
    rail_nics: Mapping[str, Sequence[str]] = {}
    """The NICs on each rail by its name, where a file has them."""
    ports: Ports = Ports()


class _Switch(msgspec.Struct, forbid_unknown_fields=True):
    """A switch as described, in the YAML form or by SLURM."""

    name: _Text
    uplink_gbps: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    hosts: _Text | list[_Text] = []
    switches: _Text | list[_Text | _Switch] = []


class _Switches(msgspec.Struct, forbid_unknown_fields=True):
    """A document of the YAML form."""

    switches: list[_Switch] = []
    rails: Rails | dict[_Text, list[_Text]] = "any"
    cables: list[tuple[_Text, _Text]] = []
    ports: dict[_Text, list[_Text]] = {}


def read_switches(path: Path | str, hosts: Iterable[str] | None = None) -> Interconnect:
    """Read a topology.conf or the YAML form, as suffix or else text say.

    Args:
        path: the file.
        hosts: the job's hosts; the tree is cut down to them, and each must be in it.

    Raises InputError: the file cannot be read, or as the two parsers.
    """
    check_type(path, "path", str, Path)
    path = Path(path)
    text, where = read_text(path, limit=MAX_BYTES), str(path)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    if not is_yaml and (path.suffix.lower() == ".conf" or _FIRST.search(text)):
        return Interconnect(switches=parse_slurm_topology(text, where=where, hosts=hosts))
    return parse_switch_yaml(text, where=where, hosts=hosts)


def parse_slurm_topology(
    text: str, *, where: str, hosts: Iterable[str] | None = None
) -> SwitchTree:
    """Return the tree of a topology.conf; LinkSpeed has no unit, so uplinks have no limit."""
    switches = ((_slurm_switch(line, place), place) for place, line in _lines(text, where))
    return _join(
        (switch for parsed in switches for switch in _flat(*parsed)), where=where, hosts=hosts
    )


def parse_switch_yaml(text: str, *, where: str, hosts: Iterable[str] | None = None) -> Interconnect:
    """Return the network of the YAML form."""
    try:
        read = _plain_yaml(text, where)
        require(read, where, "is empty", _FORMS[""])
        for key, value in read.items() if isinstance(read, dict) else ():
            if value == "":
                raise InputError(f"{where} {key}:", "is empty", _FORMS.get(f".{key}", _FORMS[""]))
        if isinstance(read, list):
            read = _of_slurm(read, where)
        form = msgspec.convert(read, _Switches, strict=False)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        if "nesting depth" in str(error.problem):  # the library's own limit, since PyYAML 6.0.4
            raise InputError(place, *_TOO_MUCH) from error
        right = "correct it there; a name with brackets wants quotes"
        raise InputError(place, f"is not YAML ({error.problem})", right) from error
    except yaml.YAMLError as error:
        raise InputError(where, "has characters not allowed in YAML", "save it as text") from error
    except msgspec.ValidationError as error:
        fault, _, path = ascii(str(error))[1:-1][:200].partition(" - at `$")
        place = f"{where} {path.strip('.`')}".strip()
        right = next(form for key, form in _FORMS.items() if key in path)
        raise InputError(place, f"is of another form ({fault})", right) from error
    if form.cables or form.ports:
        right = "describe the network that NCCL is to use"
        require(not form.switches, where, "has switches and cables", right)
        require(form.cables, where, "has ports and no cable", "write cables: and a list of them")
        fault = "has cables and rails: only, which is for NICs at switches"
        require(form.rails == "any", where, fault, "leave rails: out")
        ports = describe_cables(form.cables, form.ports, where=where)
        return Interconnect(switches=None, ports=ports)
    places = ((switch, f"{where} switches[{i}]") for i, switch in enumerate(form.switches))
    parts = (part for switch, place in places for part in _flat(switch, place))
    named = form.rails if isinstance(form.rails, dict) else {}
    require(form.rails, f"{where} rails", "is empty", _FORMS[".rails"])
    return Interconnect(
        switches=_join(parts, where=where, hosts=hosts),
        rails="only" if isinstance(form.rails, dict) else form.rails,
        rail_nics=named,
    )


def _of_slurm(topologies: list[Any], where: str) -> dict[str, Any]:
    """Return the form of the default topology of SLURM's topology.yaml(5), or of its only one."""
    known = [one for one in topologies if isinstance(one, dict)]
    usual = [one for one in known if one.get("cluster_default") == "true"] or known
    fault = f"has {len(usual)} topologies that may be meant"
    require(len(usual) == 1, where, fault, "mark one by cluster_default: true")
    tree = usual[0].get("tree")
    if not isinstance(tree, dict) or not isinstance(tree.get("switches"), list):
        name = shown(str(usual[0].get("topology")))
        fault = f"is of another form (no tree of switches in topology {name})"
        raise InputError(where, fault, _FORMS[""])
    names = {"switch": "name", "nodes": "hosts", "children": "switches"}
    switches = (one if isinstance(one, dict) else {} for one in tree["switches"])
    renamed = [{names[key]: one[key] for key in names if one.get(key)} for one in switches]
    return {"switches": renamed}


class _Texts(_Loader):  # type: ignore[misc]
    """Reads every scalar as text, and refuses a field that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Return the fields of a mapping."""
        names: set[str] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is None or name in names:
                fault = "a name is needed" if name is None else f"{shown(name)} is there twice"
                raise yaml.constructor.ConstructorError(problem=fault, problem_mark=key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def _plain_yaml(text: str, where: str) -> Any:
    """Return the document of YAML text, which is refused before values could grow by aliases."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        place = f"{where}:{event.start_mark.line + 1}"
        if getattr(event, "anchor", None) is not None:
            raise InputError(place, "has an anchor or alias", "write the value out")
        if getattr(event, "tag", None) is not None:
            raise InputError(place, f"has the tag {shown(event.tag)}", "leave it out")
        if depth > MAX_DEPTH or count > MAX_VALUES:
            raise InputError(place, *_TOO_MUCH)
    return yaml.load(text, Loader=_Texts)


def _flat(switch: _Switch, where: str) -> Iterator[_Part]:
    """Yield a switch, and then the switches described inside it."""
    hosts, below = (
        [names] if isinstance(names, str) else names for names in (switch.hosts, switch.switches)
    )
    names = (child if isinstance(child, str) else child.name for child in below)
    tree = SwitchTree(
        name=check_host_name(switch.name, where=where),
        hosts=expand(",".join(map(str, hosts)), where=where),
        uplink_gbps=switch.uplink_gbps,
    )
    yield where, tree, expand(",".join(names), where=where)
    for i, child in enumerate(below):
        if isinstance(child, _Switch):
            yield from _flat(child, f"{where}.switches[{i}]")


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
        joined = " ".join(begun).strip()
        begun.clear()
        if joined:
            yield f"{where}:{start}", joined


def _slurm_switch(line: str, place: str) -> _Switch:
    """Return the switch of a line; keys may be in any case."""
    pairs: dict[str, str] = {}
    at = 0
    while at < len(line):
        match = _PAIR.match(line, at)
        if match is None:
            raise InputError(place, f"{shown(line[at:].strip())} is not understood", _RIGHT)
        key = match["key"].lower()
        if key not in _KEYS:
            blocks = " (topology/block is no tree of switches)" if key == "blockname" else ""
            raise InputError(place, f"{shown(match['key'])} is unknown{blocks}", _RIGHT)
        if key in pairs:
            raise InputError(place, f"{shown(match['key'])} is there twice", "once is right")
        pairs[key] = match["plain"] or match["quoted"] or ""
        at = match.end()
    require(pairs.get("switchname"), place, "has no SwitchName", _RIGHT)
    if "nodes" in pairs and "switches" in pairs:
        raise InputError(place, "has both nodes and switches", "one is right")
    nodes, below = pairs.get("nodes", ""), pairs.get("switches", "")
    return _Switch(name=pairs["switchname"], hosts=nodes, switches=below)


def _join(parts: Iterable[_Part], *, where: str, hosts: Iterable[str] | None) -> SwitchTree:
    """Return the tree of all these switches, or of the switches above `hosts`."""
    by_name: dict[str, _Part] = {}
    names = 0
    for place, switch, below in parts:
        names += 1 + len(switch.hosts) + len(below)
        if names > MAX_NAMES:
            raise InputError(place, f"makes it more than {MAX_NAMES} names", "describe one cluster")
        if switch.name in by_name:
            fault = f"switch {shown(switch.name)} is also at {by_name[switch.name][0]}"
            raise InputError(place, fault, "describe each switch once")
        by_name[switch.name] = (place, switch, below)
    require(by_name, where, "has no switch", "describe one at least")
    above = _above(by_name)
    tops = tuple(_tree(by_name, name, 1) for name in by_name if name not in above)
    hanging = {switch.name for top in tops for switch in top.all_switches}
    for name in by_name.keys() - hanging:
        fault = f"switch {shown(name)} is below itself, or below such a switch"
        raise InputError(by_name[name][0], fault, "every switch hangs from a root")
    tree = tops[0] if len(tops) == 1 else SwitchTree(name="", switches=tops)
    if hosts is not None:
        return restrict(tree, hosts, where=where)
    check_hosts_once(tree, set(tree.all_hosts), where)
    return tree


def _above(by_name: dict[str, _Part]) -> dict[str, str]:
    """Return the name of the switch above each switch."""
    above: dict[str, str] = {}
    for place, switch, below in by_name.values():
        for name in below:
            require(name in by_name, place, f"there is no switch {shown(name)}", "describe it")
            if name in above:
                fault = f"switch {shown(name)} is also below {shown(above[name])}"
                raise InputError(place, fault, "a switch is below one other at most")
            above[name] = switch.name
    return above


def _tree(by_name: dict[str, _Part], name: str, level: int) -> SwitchTree:
    place, switch, below = by_name[name]
    fault = f"switch {shown(name)} is below {MAX_LEVELS} others or more"
    require(level <= MAX_LEVELS, place, fault, f"at most {MAX_LEVELS} levels are read")
    return msgspec.structs.replace(
        switch, switches=tuple(_tree(by_name, child, level + 1) for child in below)
    )
