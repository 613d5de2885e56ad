"""SLURM's topology.conf, as topology/tree reads it, and topology.yaml, which SLURM 25.05 added.

They follow topology.conf(5) and topology.yaml(5), and src/common/parse_config.c for what a line of
the former may be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from tccl_py.errors import InputError
from tccl_py.model.cluster import check_host_name, shown
from tccl_py.model.switches import MAX_NAMES, SwitchLine
from tccl_py.readers.hosts import expand

# YAML as plain texts, lists and mappings that know their line; whatever else YAML has is refused.


MAX_DEPTH = 64
MAX_VALUES = 500_000

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Value:
    """A text, a list or a mapping, and `file:line` of where it begins."""

    content: str | list[Value] | dict[str, Value]
    where: str

    def refused(self, what: str, right: str) -> InputError:
        """The error that names this place."""
        return InputError(self.where, what, right)

    def text(self, meaning: str) -> str:
        """The text; `meaning` says what it should be.

        Raises:
            InputError: it is a list or a mapping, or empty.
        """
        if not isinstance(self.content, str) or not self.content:
            raise self.refused(f"there is {self.kind}", f"{meaning} is needed")
        return self.content

    def items(self, meaning: str) -> list[Value]:
        """The values of a list.

        Raises:
            InputError: it is none.
        """
        if not isinstance(self.content, list):
            raise self.refused(f"there is {self.kind}", f"a list of {meaning} is needed")
        return self.content

    def fields(self, meaning: str, *known: str) -> dict[str, Value]:
        """The fields of a mapping.

        Raises:
            InputError: it is none, or has fields that are not `known`.
        """
        if not isinstance(self.content, dict):
            raise self.refused(f"there is {self.kind}", f"{meaning} is needed: {', '.join(known)}")
        for name, value in self.content.items():
            if name not in known:
                right = f"{meaning} has {', '.join(known)}"
                raise value.refused(f"{shown(name)} is unknown here", right)
        return self.content

    @property
    def kind(self) -> str:
        """What it is, for a message."""
        if isinstance(self.content, str):
            return f"the text {shown(self.content)}" if self.content else "nothing"
        return "a list" if isinstance(self.content, list) else "a mapping"


def parse_yaml(text: str, *, where: str) -> Value:
    """Parse YAML of one document.

    Raises:
        InputError: it is not YAML, is empty, or has anchors, aliases, tags, doubled fields, several
            documents, more than MAX_DEPTH levels or MAX_VALUES values.
    """
    try:
        return _document(_plain_events(text, where), where)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}" if mark else where
        right = "correct it there; a name with brackets wants quotes"
        raise InputError(place, f"is not YAML ({error.problem})", right) from error
    except yaml.YAMLError as error:
        right = "save it as plain text"
        raise InputError(where, "has characters that YAML does not allow", right) from error


def _plain_events(text: str, where: str) -> Iterator[tuple[yaml.Event, str]]:
    """The events of the one document, without its frame, and their places."""
    depth = documents = 0
    # Events come one by one, so that what is too deep or too much is never read whole.
    for count, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        place = f"{where}:{event.start_mark.line + 1}"
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        named = isinstance(event, yaml.NodeEvent) and event.anchor is not None
        if named:
            raise InputError(place, "has an anchor or alias", "write the value out")
        if getattr(event, "tag", None) is not None:
            raise InputError(place, f"has the tag {shown(event.tag)}", "leave it out")
        if depth > MAX_DEPTH or count > MAX_VALUES or documents > 1:
            what = "has several documents" if documents > 1 else "is too deep or too long"
            raise InputError(place, what, "describe the switches of one cluster")
        if isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            yield event, place


def _document(events: Iterator[tuple[yaml.Event, str]], where: str) -> Value:
    first = next(events, None)
    value = Value("", where) if first is None else _value(*first, events)
    for _ in events:  # the rest of the stream has to be right as well
        pass
    return value


def _value(event: yaml.Event, place: str, events: Iterator[tuple[yaml.Event, str]]) -> Value:
    if isinstance(event, yaml.ScalarEvent):
        # Without quotes this is how YAML writes "nothing".
        nothing = event.implicit[0] and event.value in ("~", "null", "Null", "NULL")
        return Value("" if nothing else event.value, place)
    if isinstance(event, yaml.SequenceStartEvent):
        return Value([_value(*one, events) for one in _until_end(events)], place)
    fields: dict[str, Value] = {}
    for key, key_place in _until_end(events):
        name = _value(key, key_place, events).text("a field's name")
        if name in fields:
            raise InputError(key_place, f"{shown(name)} is there twice", "once is right")
        fields[name] = _value(*next(events), events)
    return Value(fields, place)


def _until_end(events: Iterator[tuple[yaml.Event, str]]) -> Iterator[tuple[yaml.Event, str]]:
    """The events up to the end of the list or mapping that has begun."""
    for event, place in events:
        if isinstance(event, yaml.CollectionEndEvent):
            return
        yield event, place


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
