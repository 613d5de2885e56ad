"""Lists of hosts as launchers write them, and SLURM's host list expressions.

Sources: Open MPI (PRRTE's src/util/hostfile), MPICH (Hydra's host files) and SLURM
(slurm_read_hostfile in src/api/allocate.c).
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.files import read_text
from tccl_py.model.cluster import MAX_HOSTS, check_host_name, parse_gpus, shown

MAX_PARTS = 64  # Parts of one name: brackets, and texts between them
MAX_SLOTS = 4_096
MAX_RANKS = 1_048_576
MAX_BYTES = 16 * 1024 * 1024  # More than a line for each of MAX_HOSTS x 8 ranks
MAX_LINE = 2 * 1024 * 1024  # Room for MAX_HOSTS names with their domains, apart by commas
NODE_NAME = "SLURMD_NODENAME"  # SLURM's name of a task's node; can differ from the host's
_MAX_WORDS = 64

_SEPARATORS = re.compile(r"[,\s]+")
_LIKE_A_FILE = re.compile(
    r"/|\.(txt|text|lst|list|conf|cfg|ya?ml|json|csv|xml)\s*$"
    r"|((^|[-_.])hosts|(host|machine|rank|node)(file|list)(\.\w+)?)\s*$",
    re.I,
)
_HOST_ENTRY = re.compile(r"(?:[^][,\s]|\[[^][]*\])+")
_PART = re.compile(r"\[(?P<ranges>[^][]*)\]|[^][]+")
_RUN = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?", re.ASCII)
_RANGE = "ranges in brackets are needed, as in gpu[001-016,020]"

_ENTRY = re.compile(r"(?P<names>.*?)(?:[:*](?P<count>[0-9]{1,6}))?", re.ASCII)
_SLOTS = ("slots", "count", "cpu")
"""Open MPI's keys for the number of slots."""
_WITHOUT_MEANING = re.compile("(max|user|port|binding|ifhn).*|.*max")
"""Keys of Open MPI and Hydra about limits and ways to a host; plans do not depend on them."""
_LINE = "a line is NAME, NAME:8, NAME slots=8, or a SLURM expression such as gpu[001-016,020]"


def expand(expression: str, *, where: str = "host list") -> tuple[str, ...]:
    """Return the hosts of a SLURM host list expression, in order and with repetitions.

    Brackets may stand anywhere; a number is as wide as the first of its range. InputError:
    wrong brackets or ranges, more than MAX_HOSTS hosts, or unfit names.

    >>> expand("gpu[08-10],login1"), expand("r[1-2]n[0-1]")
    (('gpu08', 'gpu09', 'gpu10', 'login1'), ('r1n0', 'r1n1', 'r2n0', 'r2n1'))
    """
    hosts: list[str] = []
    for entry in _entries(expression, where=where):
        parts: list[list[str]] = []
        for part in _PART.finditer(entry):
            texts: Iterator[str] = iter([part[0]])
            if part["ranges"] is not None:
                runs = (_run(text, entry, where) for text in part["ranges"].split(","))
                texts = itertools.chain.from_iterable(runs)
            # Of too many only the first.
            parts.append(list(itertools.islice(texts, MAX_HOSTS + 1)))
            fault = f"{shown(entry)} has more than {MAX_PARTS} parts"
            require(len(parts) <= MAX_PARTS, where, fault, "a few brackets are enough for any name")
        if len(hosts) + math.prod(map(len, parts)) > MAX_HOSTS:
            fault = f"{shown(entry)} makes it more than {MAX_HOSTS} hosts"
            raise InputError(where, fault, "give the hosts of one job")
        for name in itertools.product(*parts):
            hosts.append(check_host_name("".join(name), where=where))
    return tuple(hosts)


def _entries(expression: str, *, where: str) -> Iterator[str]:
    """Yield the parts of an expression between commas and spaces, brackets and all."""
    at = 0
    while at < len(expression):
        match = _SEPARATORS.match(expression, at) or _HOST_ENTRY.match(expression, at)
        if match is None:
            raise InputError(where, f"brackets do not match at {shown(expression[at:])}", _RANGE)
        if match.re is _HOST_ENTRY:
            yield match[0]
        at = match.end()


def _run(text: str, entry: str, where: str) -> Iterator[str]:
    match = _RUN.fullmatch(text)
    if match is None:
        raise InputError(where, f"{shown(text)} in {shown(entry)} is no range", _RANGE)
    low, high = int(match["low"]), int(match["high"] or match["low"])
    fault = f"the range {shown(text)} in {shown(entry)} goes down"
    require(low <= high, where, fault, "the lower number is first")
    return (f"{number:0{len(match['low'])}d}" for number in range(low, high + 1))


class HostSlots(msgspec.Struct, frozen=True):
    """A host of a list, and its number of ranks or None."""

    name: str
    slots: int | None = None


def read_host_list(path: Path) -> tuple[HostSlots, ...]:
    """Read a list of hosts."""
    return parse_host_list(read_text(path, limit=MAX_BYTES), where=str(path))


def listed_hosts(text: str, *, where: str) -> tuple[HostSlots, ...]:
    """Return the hosts of a list's file, or of a list as its text, as SLURM_JOB_NODELIST has it."""
    # Path.exists raises for lists that are longer than a file's name may be.
    if os.path.exists(text):  # noqa: PTH110
        return read_host_list(Path(text))
    right = "name a file of hosts, or hosts, as in node[1-8]"
    require(not _LIKE_A_FILE.search(text), f"{where} {shown(text)}", "is no file", right)
    hosts = parse_host_list(text, where=where)
    # Only a file has a line for each slot; here `:8` gives a number.
    twice = [host.name for host in hosts if host.slots and not re.search("[:*=@\\n]", text)]
    require(not twice, where, f"names {shown(''.join(twice[:1]))} twice", "name each host once")
    return hosts


def gpus_of_hosts(text: str | None, hosts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Parse GPUs of all hosts, as `0-3`, or of some, as `gpu[1-2]:0-3;gpu3:4,5`."""
    gpus_of: dict[str, tuple[int, ...]] = {}
    for part in [] if text is None else text.split(";"):
        names, colon, gpus = part.rpartition(":")
        indices = tuple(sorted(parse_gpus(gpus, "`gpus`")))
        for name in expand(names.strip(), where="`gpus`") if colon else hosts:
            require(name not in gpus_of, "`gpus`", f"names {shown(name)} twice", "once is right")
            gpus_of[name] = indices
    return gpus_of


def parse_host_list(text: str, *, where: str) -> tuple[HostSlots, ...]:
    """Return the hosts of a list, in the order of first lines, which is NCCL's order.

    Lines have these forms, and `#` starts a comment:

        node1 slots=8 max_slots=16      Open MPI's hostfile
        node1:8                         MPICH's (Hydra's) host file
        node1                           a plain list; SLURM's hostfile has such a line for each task
        gpu[001-016,020]:8,login1*2     SLURM's expressions; `:8` and `*8` stand for 8 lines

    Lines of a host add up: a bare name adds a slot, `:8` adds eight, and a single bare name leaves
    the slots open. `slots=` after earlier lines of the host is refused, as by Open MPI. Limits such
    as `max_slots=` have no meaning for plans.
    """
    slots: Counter[str] = Counter()
    names: set[str] = set()
    mentions = 0
    for place, content in _lines(text, where):
        entry, *options = content.split(maxsplit=_MAX_WORDS)
        own = _slots(options, place)
        for name, count, counted in _name_hosts(entry, place):
            if own is not None and (counted or slots[name]):
                right = "give all slots of a host on one line"
                raise InputError(place, f"{name} has slots= after another line", right)
            if own is not None or counted or slots[name]:
                names.add(name)
            slots[name] += count if own is None else own
            if slots[name] > MAX_SLOTS:
                right = f"at most {MAX_SLOTS} are possible"
                raise InputError(place, f"{name} has {slots[name]} slots", right)
            mentions += 1
            if len(slots) > MAX_HOSTS or mentions > MAX_RANKS:
                right = "give the hosts of one job"
                raise InputError(place, f"makes it more than {MAX_HOSTS} hosts", right)
    require(slots, where, "names no host", _LINE)
    return tuple(HostSlots(name, slots[name] if name in names else None) for name in slots)


def _lines(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield places and contents without comments, one at a time: millions of lines take much."""
    for number, line in enumerate(io.StringIO(text), start=1):
        if len(line) > MAX_LINE:
            fault = f"has more than {MAX_LINE} characters"
            raise InputError(f"{where}:{number}", fault, "give the hosts of one job, a line each")
        content = line.partition("#")[0].strip()
        if "=" in content:
            content = "=".join(part.strip() for part in content.split("="))
        if content:
            yield f"{where}:{number}", content


def _name_hosts(entry: str, place: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the hosts of a line's first word: name, number of slots, whether a number is given."""
    parts = _entries(entry.rpartition("@")[2], where=place)
    for part in itertools.chain([next(parts, "")], parts):
        match = _ENTRY.fullmatch(part)
        if match is None or not match["names"]:
            raise InputError(place, f"{shown(part or entry)} names no host", _LINE)
        right = "name the hosts themselves"
        require(part[0] not in "^+", place, f"{shown(part)} depends on an allocation", right)
        count = int(match["count"] or 1)
        right = f"1 to {MAX_SLOTS} are possible"
        require(0 < count <= MAX_SLOTS, place, f"{shown(part)} stands for {count} slots", right)
        for name in expand(match["names"], where=place):
            yield name, count, match["count"] is not None


def _slots(options: list[str], place: str) -> int | None:
    """Return the slots that a line's options give; None without such an option."""
    slots = None
    for option in options:
        key, _, value = option.partition("=")
        if key in _SLOTS:
            if not re.fullmatch(r"[0-9]{1,6}", value, re.ASCII) or not 0 < int(value) <= MAX_SLOTS:
                raise InputError(place, f"has {shown(option)}", f"1 to {MAX_SLOTS} are possible")
            slots = int(value)
        elif not value or not _WITHOUT_MEANING.fullmatch(key):
            raise InputError(place, f"{shown(option)} is not understood after a host", _LINE)
    return slots


def names_of_this_host() -> Iterator[str]:
    """Yield this host's names: its own, then SLURM's, which a launcher may copy to other hosts."""
    name = socket.gethostname()
    yield name
    yield name.partition(".")[0]
    if os.environ.get(NODE_NAME):
        yield os.environ[NODE_NAME]
    # This asks the name service, which may take long.
    yield socket.getfqdn()
