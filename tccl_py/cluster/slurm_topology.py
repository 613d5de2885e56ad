"""SLURM's topology.conf, as topology/tree reads it, and topology.yaml, which SLURM 25.05 added.

They follow topology.conf(5) and topology.yaml(5), and src/common/parse_config.c for what a line of
the former may be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tccl_py.cluster.expressions import expand
from tccl_py.cluster.names import check_host_name, shown
from tccl_py.cluster.switch_tree import MAX_NAMES, SwitchLine
from tccl_py.cluster.yaml_values import Value
from tccl_py.errors import InputError

_PAIR = re.compile(r"\s*(?P<key>[A-Za-z0-9_.]+)\s*=\s*(?:\"(?P<quoted>[^\"]*)\"|(?P<plain>\S+))")
_KEYS = ("switchname", "nodes", "switches", "linkspeed")
_RIGHT = "a line is SwitchName=NAME with Nodes=LIST or Switches=LIST"
_YAML_KEYS = {"switch": "switchname", "nodes": "nodes", "children": "switches"}
_TRUE = ("true", "True", "TRUE", "yes", "on")
_FIRST = re.compile(r"^\s*(switchname|blockname)\s*=", re.IGNORECASE | re.MULTILINE)


def is_slurm_topology(text: str) -> bool:
    """Whether the text looks like a topology.conf."""
    return _FIRST.search(text) is not None


def switch_lines(text: str, *, where: str) -> list[SwitchLine]:
    """The switches of a topology.conf.

    LinkSpeed is left out: SLURM gives it no unit and does not use it.

    Raises:
        InputError: a line that describes no switch, is not understood, or makes it too many hosts.
    """
    lines, hosts = [], 0
    for place, content in _whole_lines(text, where):
        line = _switch(_pairs(content, place), place)
        hosts += len(line.hosts) + len(line.switches)
        if hosts > MAX_NAMES:
            right = "describe one cluster"
            raise InputError(place, f"makes it more than {MAX_NAMES} names", right)
        lines.append(line)
    return lines


def is_slurm_yaml(document: Value) -> bool:
    """Whether the YAML looks like a topology.yaml: a list of topologies."""
    topologies = document.content if isinstance(document.content, list) else []
    return any(isinstance(one.content, dict) and "topology" in one.content for one in topologies)


def yaml_switch_lines(document: Value) -> list[SwitchLine]:
    """The switches of the one tree of a topology.yaml, or of its default one.

    Raises:
        InputError: no tree, or several and none of them the default; a switch that is none, or too
            many hosts.
    """
    trees = [one for one in document.items("topologies") if "tree" in _topology(one)]
    default = [one for one in trees if _topology(one).get("cluster_default") in _TRUE]
    if len(default or trees) != 1:
        right = "leave one of those with tree:, or say cluster_default: true of one"
        raise document.refused(f"has {len(trees)} topologies that are a tree", right)
    (chosen,) = default or trees
    lines, names = [], 0
    fields = chosen.fields("a topology", "topology", "cluster_default", "tree")
    tree = fields["tree"].fields("a tree", "switches")
    for value in tree["switches"].items("switches") if tree else ():
        known = value.fields("a switch", "switch", "nodes", "children")
        if "switch" not in known:
            raise value.refused("this switch has no name", "write switch: and a name")
        pairs = {
            _YAML_KEYS[key]: one.text("a name or a list in one text") for key, one in known.items()
        }
        line = _switch(pairs, value.where)
        names += len(line.hosts) + len(line.switches)
        if names > MAX_NAMES:
            raise value.refused(f"makes it more than {MAX_NAMES} names", "describe one cluster")
        lines.append(line)
    return lines


def _topology(value: Value) -> dict[str, str | None]:
    """The fields of a topology, as far as they are texts."""
    fields = value.content if isinstance(value.content, dict) else {}
    return {
        key: one.content if isinstance(one.content, str) else None for key, one in fields.items()
    }


def _whole_lines(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Lines without comments, with those joined that end in a backslash, and where they begin."""
    begun: list[str] = []
    start = 1
    for number, line in enumerate(text.split("\n"), start=1):
        start = start if begun else number
        content = re.sub(r"(?<!\\)#.*", "", line.rstrip("\r")).rstrip()
        begun.append(content.removesuffix("\\"))
        if content.endswith("\\"):
            continue
        whole = " ".join(begun).strip()
        begun.clear()
        if whole:
            yield f"{where}:{start}", whole
    if whole := " ".join(begun).strip():
        yield f"{where}:{start}", whole


def _pairs(content: str, place: str) -> dict[str, str]:
    """The values of a line by their keys, in small letters."""
    pairs: dict[str, str] = {}
    at = 0
    while at < len(content):
        match = _PAIR.match(content, at)
        if match is None:
            raise InputError(place, f"{shown(content[at:].strip())} is not understood", _RIGHT)
        key = match["key"].lower()
        if key == "blockname":
            what = "describes blocks (topology/block), which are no tree of switches"
            raise InputError(place, what, _RIGHT)
        if key not in _KEYS:
            raise InputError(place, f"{shown(match['key'])} is unknown", _RIGHT)
        if key in pairs:
            raise InputError(place, f"{shown(match['key'])} is there twice", "once is right")
        pairs[key] = match["plain"] or match["quoted"] or ""
        at = match.end()
    return pairs


def _switch(pairs: dict[str, str], place: str) -> SwitchLine:
    if not pairs.get("switchname"):
        raise InputError(place, "has no SwitchName", _RIGHT)
    name = check_host_name(pairs["switchname"], where=place)
    if "nodes" in pairs and "switches" in pairs:
        what = f"switch {name} has both nodes and switches"
        raise InputError(place, what, "SLURM takes one of them")
    if not re.fullmatch(r"[0-9]{1,10}", pairs.get("linkspeed", "1"), re.ASCII):
        raise InputError(place, f"LinkSpeed is {shown(pairs['linkspeed'])}", "it is a whole number")
    return SwitchLine(
        name=name,
        where=place,
        hosts=expand(pairs.get("nodes", ""), where=place),
        switches=expand(pairs.get("switches", ""), where=place),
    )
