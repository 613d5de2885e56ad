"""Lists of hosts as launchers write them.

What a line may be follows Open MPI (PRRTE's src/util/hostfile and src/mca/rmaps/rank_file), MPICH
(Hydra's host files) and SLURM (slurm_read_hostfile in src/api/allocate.c).
"""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import read_text
from tccl_py.model.cluster import MAX_HOSTS, check_host_name, shown

MAX_PARTS = 64
"""Of one name, brackets and what is between them."""

_SEPARATORS = re.compile(r"[,\s]+")
_HOST_ENTRY = re.compile(r"(?:[^][,\s]|\[[^][]*\])+")
_PART = re.compile(r"\[(?P<ranges>[^][]*)\]|[^][]+")
_RUN = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?", re.ASCII)
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<digits>[0-9]{1,18})", re.ASCII)
_RANGE = "ranges in brackets are needed, as in gpu[001-016,020]"


class _Run(msgspec.Struct, frozen=True):
    """Numbers in a row, `width` digits wide at least; or one text as it is."""

    numbers: range
    width: int
    text: str = ""

    @property
    def texts(self) -> Iterator[str]:
        return (self.text or f"{number:0{self.width}d}" for number in self.numbers)


def expand(expression: str, *, where: str = "host list") -> tuple[str, ...]:
    """The hosts of a SLURM host list expression, in its order; a host named twice is there twice.

    Brackets may stand anywhere in a name, several of them too; SLURM wants the last one at the end.
    A number is as wide as the first of its range.

    >>> expand("gpu[08-10],login1"), expand("r[1-2]n[0-1]")
    (('gpu08', 'gpu09', 'gpu10', 'login1'), ('r1n0', 'r1n1', 'r2n0', 'r2n1'))

    Raises:
        InputError: brackets that do not match or are empty, ranges that are none or go down, more
            than MAX_HOSTS hosts, or what cannot be a host's name.
    """
    hosts: list[str] = []
    for entry in entries(expression, where=where):
        parts = _parts(entry, where)
        count = math.prod(sum(len(run.numbers) for run in part) for part in parts)
        if len(hosts) + count > MAX_HOSTS:
            what = f"{shown(entry)} makes it more than {MAX_HOSTS} hosts"
            raise InputError(where, what, "give the hosts of one job")
        names = itertools.product(*([text for run in part for text in run.texts] for part in parts))
        hosts.extend(check_host_name("".join(name), where=where) for name in names)
    return tuple(hosts)


def compress(names: Iterable[str]) -> str:
    """The expression that `expand` turns into these names, in their order.

    >>> compress(["gpu08", "gpu09", "gpu10", "gpu12", "login"])
    'gpu[08-10,12],login'
    """
    split = [_split(name) for name in names]
    # A name without a number is no part of a bracket: n,n0 are two.
    alike = itertools.groupby(split, lambda one: (one[0], bool(one[1])))
    groups = (tuple(group) for _, group in alike)
    return ",".join(_group_text(group) for group in groups)


def entries(expression: str, *, where: str) -> Iterator[str]:
    """The parts of an expression between commas and spaces, brackets and all.

    Raises:
        InputError: brackets that do not match.
    """
    at = 0
    while at < len(expression):
        match = _SEPARATORS.match(expression, at) or _HOST_ENTRY.match(expression, at)
        if match is None:
            what = f"brackets do not match at {shown(expression[at:])}"
            raise InputError(where, what, _RANGE)
        if match.re is _HOST_ENTRY:
            yield match[0]
        at = match.end()


def _parts(entry: str, where: str) -> list[list[_Run]]:
    """What an entry is put together from: for each part, the runs it may be from."""
    parts = []
    for match in _PART.finditer(entry):
        if match["ranges"] is None:
            parts.append([_Run(range(1), 0, match[0])])
        else:
            parts.append([_run(text, entry, where) for text in match["ranges"].split(",")])
        if len(parts) > MAX_PARTS:
            what = f"{shown(entry)} has more than {MAX_PARTS} parts"
            raise InputError(where, what, "a few brackets are enough for any name")
    return parts


def _run(text: str, entry: str, where: str) -> _Run:
    match = _RUN.fullmatch(text)
    if match is None:
        raise InputError(where, f"{shown(text)} in {shown(entry)} is no range", _RANGE)
    low, high = int(match["low"]), int(match["high"] or match["low"])
    if low > high:
        what = f"the range {shown(text)} in {shown(entry)} goes down"
        raise InputError(where, what, "the lower number is first")
    return _Run(range(low, high + 1), len(match["low"]))


def _split(name: str) -> tuple[str, str]:
    """A name as a prefix and the digits it ends with, if any."""
    match = _NUMBERED.fullmatch(name)
    return (match["prefix"], match["digits"]) if match else (name, "")


def _group_text(group: tuple[tuple[str, str], ...]) -> str:
    """Names with one prefix, in brackets if there are several."""
    prefix = group[0][0]
    digits = [one[1] for one in group]
    if not digits[0]:
        return ",".join(prefix for _ in digits)
    runs: list[list[str]] = []
    for text in digits:
        if runs and text == f"{int(runs[-1][-1]) + 1:0{len(runs[-1][0])}d}":
            runs[-1].append(text)
        else:
            runs.append([text])
    texts = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{prefix}[{','.join(texts)}]" if len(digits) > 1 else prefix + texts[0]


MAX_SLOTS = 4_096
MAX_RANKS = 1_048_576
MAX_BYTES = 16 * 1024 * 1024
"""More than a line for each of MAX_HOSTS x 8 ranks; larger files are refused unread."""
MAX_LINE = 2 * 1024 * 1024
"""Room for MAX_HOSTS names with their domains, apart by commas."""
_MAX_WORDS = 64

_ENTRY = re.compile(r"(?P<names>.*?)(?:[:*](?P<count>[0-9]{1,6}))?", re.ASCII)
_RANK = re.compile(r"rank\s+(?P<rank>[0-9]{1,9})=(?P<host>\S+)(?:\s+slot=\S+)?", re.ASCII)
_SLOTS = {"slots", "count", "cpu"}
_MAX_SLOTS = {"max_slots", "slots_max", "max_count", "count_max", "max_cpu", "cpu_max"}
"""What Open MPI's reader takes for the number of slots and for its limit, - standing for _ too."""
_WITHOUT_MEANING = {"user", "username", "user_name", "port", "binding", "ifhn"}
"""Keys about how a host is reached, of Open MPI and Hydra; nothing is planned by them."""
_LINE = "a line is NAME, NAME:8, NAME slots=8, or a SLURM expression such as gpu[001-016,020]"


class HostSlots(msgspec.Struct, frozen=True):
    """A host of a list, and how many ranks it may have; None is "the list does not say".

    `times` is how often the list names it, except by rank.
    """

    name: str
    slots: int | None = None
    max_slots: int | None = None
    times: int = 1


def read_host_list(path: Path) -> tuple[HostSlots, ...]:
    """Read a list of hosts, or a rankfile.

    Raises:
        InputError: as `parse_host_list`, or the file cannot be read.
    """
    return parse_host_list(read_list(path), where=str(path))


def read_list(path: Path) -> str:
    """The text of a file about a cluster's hosts.

    Raises:
        InputError: the file cannot be read, or is larger than such files are.
    """
    if path.is_file() and path.stat().st_size > MAX_BYTES:
        right = "give a list of hosts or switches"
        raise InputError(str(path), f"is larger than {MAX_BYTES} bytes", right)
    return read_text(path, limit=MAX_BYTES)


def parse_host_list(text: str, *, where: str) -> tuple[HostSlots, ...]:
    """The hosts of a list, in the order of their first lines; that is the order NCCL has them in.

    A line is one of these, and `#` starts a comment:

        node1 slots=8 max_slots=16      Open MPI's hostfile
        node1:8                         MPICH's (Hydra's) host file
        node1                           a plain list; SLURM's hostfile has such a line for each task
        gpu[001-016,020]:8,login1*2     SLURM's expressions; `:8` and `*8` stand for 8 lines
        rank 3=node1 slot=0-7           Open MPI's rankfile, all lines then

    Lines of one host add up: a bare name adds a slot, `:8` adds eight, and a bare name that is
    there once only leaves the slots open. `slots=` after other lines of its host is refused, as
    Open MPI refuses it since version 2 (before, it was added).

    Raises:
        InputError: no host, too many, or a line that is none of these; it is named.
    """
    first = next(_lines(text, where), None)
    if first is not None and first[1].startswith("rank "):
        counts = Counter(parse_rankfile(text, where=where))
        return tuple(HostSlots(name, count) for name, count in counts.items())
    found: dict[str, _Tally] = {}
    mentions = 0
    for place, content in _lines(text, where):
        entry, *options = content.split(maxsplit=_MAX_WORDS)
        slots, limit = _options(options, place)
        for name, count, counted in _named(entry, place):
            tally = found.setdefault(name, _Tally(name))
            tally.mention(count, given=counted)
            tally.set(slots, limit, place)
            mentions += 1
            if len(found) > MAX_HOSTS or mentions > MAX_RANKS:
                right = "give the hosts of one job"
                raise InputError(place, f"makes it more than {MAX_HOSTS} hosts", right)
    if not found:
        raise InputError(where, "names no host", _LINE)
    return tuple(tally.host for tally in found.values())


def parse_rankfile(text: str, *, where: str) -> tuple[str, ...]:
    """The host of each rank, by Open MPI's rankfile (`rank 3=node1 slot=0-7`); slots are ignored.

    Raises:
        InputError: a line that is none, a rank that is missing or there twice, or no rank at all.
    """
    hosts: dict[int, str] = {}
    for place, content in _lines(text, where):
        match = _RANK.fullmatch(content)
        if match is None:
            raise InputError(place, f"{shown(content)} is no rank", "write rank 3=node1 slot=0-7")
        rank = int(match["rank"])
        if rank in hosts:
            raise InputError(place, f"rank {rank} is there twice", "once is right")
        if rank >= MAX_RANKS:
            raise InputError(place, f"the rank is {rank}", f"they are 0 to {MAX_RANKS - 1}")
        hosts[rank] = check_host_name(_without_user(match["host"]), where=place)
    for rank in range(len(hosts)):
        if rank not in hosts:
            raise InputError(where, f"rank {rank} is missing", "all ranks from 0 on are needed")
    if not hosts:
        raise InputError(where, "has no rank", "write lines such as rank 0=node1 slot=0-7")
    return tuple(hosts[rank] for rank in range(len(hosts)))


@dataclass
class _Tally:
    """What the lines so far say of one host, as Open MPI's reader counts it."""

    name: str
    slots: int = 0
    given: bool = False
    limit: int | None = None
    times: int = 0

    def mention(self, count: int, *, given: bool) -> None:
        self.times += 1
        self.given = self.given or given or self.slots > 0
        self.slots += count

    def set(self, slots: int | None, limit: int | None, place: str) -> None:
        if slots is not None:
            if self.given:
                what = f"{self.name} has slots= after another line"
                raise InputError(place, what, "give all slots of a host on one line")
            self.slots, self.given = slots, True
        if limit is not None:
            if not self.given:
                self.slots, self.given = limit, True
            self.limit = limit
        if self.slots > (self.limit or MAX_SLOTS):
            what = f"{self.name} has {self.slots} slots"
            raise InputError(place, what, f"at most {self.limit or MAX_SLOTS} are possible")

    @property
    def host(self) -> HostSlots:
        slots = self.slots if self.given else None
        return HostSlots(self.name, slots, self.limit, self.times)


def _lines(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Lines that say something: their place, and what is there, with no space around =.

    One at a time: millions of short lines together take hundreds of times the file's size.

    Raises:
        InputError: a line is longer than MAX_LINE.
    """
    start = 0
    for number in itertools.count(1):
        end = text.find("\n", start)
        stop = len(text) if end < 0 else end
        if stop - start > MAX_LINE:
            what = f"has more than {MAX_LINE} characters"
            raise InputError(f"{where}:{number}", what, "give the hosts of one job, a line each")
        content = text[start:stop].partition("#")[0].strip()
        if "=" in content:
            content = "=".join(part.strip() for part in content.split("="))
        if content:
            yield f"{where}:{number}", content
        if end < 0:
            return
        start = end + 1


def _named(entry: str, place: str) -> Iterator[tuple[str, int, bool]]:
    """The hosts of a line's first word, with how many slots each, and whether that is said."""
    parts = entries(_without_user(entry), where=place)
    first = next(parts, "")
    for part in itertools.chain([first], parts):
        match = _ENTRY.fullmatch(part)
        if match is None or not match["names"]:
            raise InputError(place, f"{shown(part or entry)} names no host", _LINE)
        if part[0] in "^+":
            right = "name the hosts themselves"
            raise InputError(place, f"{shown(part)} depends on an allocation", right)
        count = int(match["count"] or 1)
        if not 0 < count <= MAX_SLOTS:
            what = f"{shown(part)} stands for {count} slots"
            raise InputError(place, what, f"1 to {MAX_SLOTS} are possible")
        for name in expand(match["names"], where=place):
            yield name, count, match["count"] is not None


def _options(options: list[str], place: str) -> tuple[int | None, int | None]:
    """The slots, and the most of them, that a line's words after the first one give."""
    slots = limit = None
    for option in options:
        key, _, value = option.partition("=")
        key = key.replace("-", "_")
        if key in _WITHOUT_MEANING and value:
            continue
        if key not in _SLOTS | _MAX_SLOTS:
            raise InputError(place, f"{shown(option)} is not understood after a host", _LINE)
        if not re.fullmatch(r"[0-9]{1,6}", value, re.ASCII) or not 0 < int(value) <= MAX_SLOTS:
            raise InputError(place, f"has {shown(option)}", f"1 to {MAX_SLOTS} are possible")
        if key in _SLOTS:
            slots = int(value)
        else:
            limit = int(value)
    return slots, limit


def _without_user(entry: str) -> str:
    """A host without the user (`user@node1`) that Open MPI would log in as."""
    return entry.rpartition("@")[2]


# What this host may be called in a list of hosts or a plan.


NODE_NAME = "SLURMD_NODENAME"
"""SLURM's name for the node that a task runs on, which need not be what the host calls itself."""


def names_of_this_host() -> Iterator[str]:
    """Its names: SLURM's if this is a task of a job, then shortest to find out first."""
    if os.environ.get(NODE_NAME):
        yield os.environ[NODE_NAME]
    name = socket.gethostname()
    yield name
    yield name.partition(".")[0]
    # This asks the name service, which may take long.
    yield socket.getfqdn()
