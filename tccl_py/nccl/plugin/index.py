"""The index of a plan for the NCCL plugin: one text file, `nccl/plugin.index` of a plan.

The plugin reads the file whole and checks all of it before use (index.c). Lines end with a newline,
a single space separates fields, and kinds of lines come in this order:

    index     = "tccl-index 2" digest provenance nccl driver numa
                [job] gpu+ need* give* must* forbid* set* tune* "end"
    digest    = "digest" HEX              BLAKE2b-256 of all bytes after this line
    provenance = "provenance" ("measured" | "simulated")
    nccl      = "nccl" (MAJOR.MINOR | "-")    NCCL of the rates; - is any known version
    driver    = "driver" (MAJOR | "-")        NVIDIA driver, of /proc/driver/nvidia/version
    numa      = "numa" (COUNT | "-")          NUMA nodes with CPUs
    job       = "job" RANKS               ranks of a job over several hosts: its GPUs of this host
                                          are the only set, without a table
    gpu       = "gpu" NVML BUS (UUID | "-")   NVML index, ascending; bus id 0000:01:00.0; GPU-...
    need      = "need" NAME VALUE         without this value in a rank's environment or nccl.conf:
                                          default NCCL everywhere. The plugin does not answer it
    give      = "give" NAME VALUE         answered for each communicator over one of the sets
    must      = "must" NAME VALUE         another value of the user means default NCCL everywhere
    forbid    = "forbid" NAME             any value of the user means default NCCL everywhere
    set       = "set" NVML,NVML... (FILE HEX | "- -") [NODES=NODE,NODE...]
                                          a graph file for communicators over exactly these GPUs,
                                          relative to the index, and its BLAKE2b-256, or the given
                                          variables alone; the NUMA node of each GPU's host buffers
    tune      = "tune" NVML,NVML... COLLECTIVE FROM TO ALGORITHM PROTOCOL CHANNELS
                                          the tuner's choice for FROM to TO bytes (nccl/tuner.py)

Sets are in ascending order of their bit masks (bit i is the index's gpu i), and a set's tune lines
in the order of COLLECTIVES and sizes. A set may have a graph file, a table, or both. Neither the
index nor a graph file may be a link, and only root and the caller may be able to write them and the
folders above them. The plugin reads the graph files once, with the index, and hands NCCL a copy in
memory: a file that changes later changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tccl_py.errors import require
from tccl_py.files import check_types, read_text
from tccl_py.nccl.settings import GRAPH_VARIABLE, Settings, environment
from tccl_py.nccl.versions import version_facts

INDEX_FILE = "plugin.index"
INDEX_HEAD = b"tccl-index 2\n"
INDEX_VARIABLE = "TCCL_INDEX"
MAX_INDEX_BYTES, MAX_GRAPH_BYTES, MAX_TUNES = 1 << 20, 1 << 18, 16384
OWN_VARIABLES = (
    GRAPH_VARIABLE,
    "NCCL_ENV_PLUGIN",
    "NCCL_NET_PLUGIN",
    "NCCL_NET",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_COMM_ID",
    "NCCL_HOSTID",
    "NCCL_CONF_FILE",
    "NCCL_TUNER_PLUGIN",
)
"""Variables by which the plugin works; no plan sets them."""
_Name = Annotated[str, Meta(pattern=r"^NCCL_[A-Z0-9_]{1,59}\Z")]
_Value = Annotated[str, Meta(pattern=r"^[!-~]+\Z")]
_STEP = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
_File = Annotated[str, Meta(pattern=rf"^{_STEP}(/{_STEP})*\Z")]
_Bus = Annotated[str, Meta(pattern=r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]\Z")]
_Uuid = Annotated[str, Meta(pattern=r"^(GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?\Z")]
_Nccl = Annotated[str, Meta(pattern=r"^([1-9][0-9]?\.(0|[1-9][0-9]?))?\Z")]
_Node = Annotated[int, Meta(ge=0, le=1023)]
_Variables = Annotated[Mapping[_Name, _Value], Meta(max_length=64)]


class IndexedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of a plan: NVML index, bus id, and UUID ("" in simulated plans)."""

    nvml: int
    bus_id: _Bus
    uuid: _Uuid = ""


class IndexedSet(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs (NVML indices) of communicators, and their graph file, if they get one."""

    gpus: tuple[int, ...]
    file: _File | None = None
    text: Annotated[bytes, Meta(max_length=MAX_GRAPH_BYTES)] = b""
    nodes: Mapping[int, _Node] = {}
    """The NUMA node of each GPU's host buffers; {} leaves them where NCCL puts them."""


class PluginIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the plugin needs from a plan; None and "" are not known."""

    simulated: bool
    gpus: Annotated[tuple[IndexedGpu, ...], Meta(min_length=1, max_length=64)]
    sets: Annotated[tuple[IndexedSet, ...], Meta(max_length=4096)] = ()
    needed: _Variables = {}
    """Variables that a job must have, as in `nccl.settings.plugin_environment`."""
    given: _Variables = {}
    """Variables that single communicators get."""
    must: _Variables = {}
    """Variables of which another value of the user means default NCCL everywhere."""
    forbid: Annotated[tuple[_Name, ...], Meta(max_length=64)] = ()
    """Variables of which any value of the user means default NCCL everywhere."""
    nccl: _Nccl = ""
    driver: int | None = None
    numa: int | None = None
    job: int = 0
    tables: Mapping[tuple[int, ...], Sequence[str]] = {}
    """The tuner's for sets of GPUs (`nccl.tuner.tune_lines`)."""

    def encode(self) -> bytes:
        """Return the bytes of the index; InputError: the plugin would not read them."""
        self._check()
        place = {gpu.nvml: 1 << number for number, gpu in enumerate(self.gpus)}
        lines = [
            f"provenance {'simulated' if self.simulated else 'measured'}",
            f"nccl {self.nccl or '-'}",
            f"driver {'-' if self.driver is None else self.driver}",
            f"numa {'-' if self.numa is None else self.numa}",
            *([f"job {self.job}"] if self.job else ()),
            *(f"gpu {gpu.nvml} {gpu.bus_id} {gpu.uuid or '-'}" for gpu in self.gpus),
            *(f"need {name} {value}" for name, value in self.needed.items()),
            *(f"give {name} {value}" for name, value in self.given.items()),
            *(f"must {name} {value}" for name, value in self.must.items()),
            *(f"forbid {name}" for name in self.forbid),
        ]
        for part in sorted(self.sets, key=lambda part: sum(place[gpu] for gpu in part.gpus)):
            gpus = ",".join(str(gpu) for gpu in sorted(part.gpus))
            nodes = ",".join(str(part.nodes[gpu]) for gpu in sorted(part.nodes))
            file = f"{part.file} {digest(part.text)}" if part.file else "- -"
            lines.append(f"set {gpus} {file}{f' NODES={nodes}' if nodes else ''}")
        for tuned in sorted(self.tables, key=lambda gpus: sum(place[gpu] for gpu in gpus)):
            gpus = ",".join(map(str, tuned))
            lines += [f"tune {gpus} {line}" for line in self.tables[tuned]]
        body = "".join(f"{line}\n" for line in (*lines, "end")).encode("ascii")
        encoded = INDEX_HEAD + b"digest %s\n%s" % (digest(body).encode(), body)
        right = f"{MAX_INDEX_BYTES} bytes"
        require(len(encoded) <= MAX_INDEX_BYTES, INDEX_FILE, "is too large", right)
        return encoded

    def _check(self) -> None:
        check_types(self, where=INDEX_FILE)
        indices = [gpu.nvml for gpu in self.gpus]
        ascending = indices == sorted(set(indices))
        require(ascending, INDEX_FILE, "has GPUs out of order", "ascending NVML indices")
        for name in OWN_VARIABLES:
            free = name not in {**self.needed, **self.given}
            require(free, INDEX_FILE, f"sets {name}", "the plugin answers it")
        masks = {frozenset(part.gpus) for part in self.sets}
        once = len(masks) == len(self.sets)
        require(once, INDEX_FILE, "has a set twice", "one graph file for a set")
        least = 1 if self.job else 2
        for part in self.sets:
            gpus = set(part.gpus)
            fits = len(gpus) == len(part.gpus) >= least and gpus <= set(indices)
            right = f"{least} or more of the plan, each once"
            require(fits, INDEX_FILE, f"has a set of GPUs {part.gpus}", right)
            gets = part.file is not None or bool(self.given)
            require(gets, INDEX_FILE, f"gives GPUs {part.gpus} nothing", "a file or variables")
            placed = not part.nodes or set(part.nodes) == gpus
            require(placed, INDEX_FILE, "has NUMA nodes of other GPUs", "one for each GPU")
        ranges = sum(map(len, self.tables.values()))
        require(ranges <= MAX_TUNES, INDEX_FILE, f"has {ranges} tuned ranges", f"{MAX_TUNES}")


_SHARING = {"NCCL_COMM_SPLIT_SHARE_RESOURCES": "0", "NCCL_COMM_SHRINK_SHARE_RESOURCES": "0"}


def plugin_environment(settings: Settings) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that jobs with the plugin need, and those that single communicators get.

    NCCL reads the first once per process, before a rank knows the others: all ranks have to be
    given them alike. It reads the second for each communicator (`VersionFacts.rereads`). A child
    that shares its parent's buffers would overrun smaller ones, so no child may share them.

    >>> from tccl_py.nccl.settings import Settings
    >>> plugin_environment(Settings(version="2.28", algo="Ring", buffsize=524288))
    ({'NCCL_BUFFSIZE': '524288'}, {'NCCL_ALGO': 'Ring'})
    >>> plugin_environment(Settings(version="2.30", p2p_level="SYS", min_channels=8))
    ({'NCCL_P2P_LEVEL': 'SYS'}, {'NCCL_MIN_NCHANNELS': '8'})
    """
    single = ("NCCL_ALGO", *version_facts(settings.version).rereads)
    variables = environment(settings)
    answers = {name: value for name, value in variables.items() if name in single}
    needed = {name: value for name, value in variables.items() if name not in single}
    return needed | (_SHARING if "NCCL_BUFFSIZE" in answers else {}), answers


def digest(data: bytes) -> str:
    """Return the BLAKE2b-256 of some bytes, as hexadecimal digits."""
    return blake2b(data, digest_size=32).hexdigest()


# What an index gives, read back from its lines.
_SET = re.compile(r"^set ([0-9,]+) (\S+) \S+", re.MULTILINE)
_GIVEN = re.compile(r"^give (\S+) (\S+)$", re.MULTILINE)
_TUNED = re.compile(r"^tune ([0-9,]+) ", re.MULTILINE)
_GPU = re.compile(r"^gpu ([0-9]+) ", re.MULTILINE)


class Indexed(msgspec.Struct, frozen=True, kw_only=True):
    """What an index gives: graph files of sets ("-": variables alone), variables, and tables."""

    folder: Path
    gpus: tuple[int, ...]
    sets: Mapping[tuple[int, ...], str]
    given: Mapping[str, str]
    tuned: frozenset[tuple[int, ...]]


def read_index(path: Path) -> Indexed:
    """Return what an index gives."""
    text = read_text(path)
    return Indexed(
        folder=path.parent,
        gpus=tuple(map(int, _GPU.findall(text))),
        sets={_numbers(gpus): file for gpus, file in _SET.findall(text)},
        given=dict(_GIVEN.findall(text)),
        tuned=frozenset(map(_numbers, _TUNED.findall(text))),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
