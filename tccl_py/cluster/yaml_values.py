"""YAML as plain texts, lists and mappings that know their line; whatever else YAML has is refused.

Nothing is constructed: values are taken from the parser's events, so that no tag can ask for an
object, no alias can multiply anything, and a name such as `010` or `no` stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from tccl_py.cluster.names import shown
from tccl_py.errors import InputError

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
