"""Released libraries of NCCL as judges of this project's rules, on machines of `pcie_machine`.

`GraphCode` calls a library's own graph code, without a GPU. `RECORDED` has answers, a line for each
release and machine: of whole communicators on GPUs, with channels, or of the graph code alone.
"""

import copy
import ctypes
import lzma
import os
import re
import subprocess
import tempfile
import timeit
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec

from tccl_py.model.machine import Knowledge
from tccl_py.model.rings import neighbours
from tccl_py.nccl.graph_search import SearchGraph, search_ring, search_tree
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.system import PathType
from tccl_py.nccl.transport import TRANSPORTS, final_channels, pair_mechanism
from tccl_py.nccl.view import view
from tccl_py.nccl_library import version_text
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tests.nccl_cases import CASES

RELEASES = ("2.28.9", "2.30.7", "2.31.2", "2.32.3")
RECORDED = CASES / "nccl-releases.txt.xz"
GPUS = tuple(range(8))
RING, BALANCED_TREE = 4, 1
_MOST_CHANNELS, _READINGS = 32, 2000


class Answer(msgspec.Struct, frozen=True):
    """Default NCCL over all GPUs of a machine.

    `ring` and `tree` are graphs as text, `channels` the final rings, and `transports` those of the
    hops of `channels` in order, by their first letter. The last two are "" where unknown.
    """

    ring: str
    tree: str
    channels: str = ""
    transports: str = ""

    def difference(self, other: "Answer") -> str:
        """Return the name of the first field that differs, "" if all known fields are equal."""
        for name in self.__struct_fields__:
            one, two = getattr(self, name), getattr(other, name)
            if one and two and one != two:
                return name
        return ""


def graph_text(rate: float, path_type: str, orders) -> str:
    """Return a graph as text: rate, type, and the GPUs of each channel."""
    return " ".join([f"{rate:g}", path_type, *map(ring_text, orders)])


def ring_text(ring) -> str:
    """Return a ring of at most 16 GPUs as a word."""
    return "".join(f"{gpu:x}" for gpu in ring)


def expected(topology: str, version: str, *, ordered_by: str = "") -> Answer:
    """Return what this project's rules say; transports are those of the hops of `ordered_by`."""
    machine = parse_nccl_topology(topology, where="random.xml")
    settings = Settings(version=version)
    seen = view(machine, Knowledge(), settings)
    ring = search_ring(seen)
    tree = search_tree(seen, channels=len(ring.orders))
    used = min(len(ring.orders), len(tree.orders))
    final = final_channels(settings, sm=seen.system.sm_min, channels=used)
    rings = [ring.orders[number % used] for number in range(final)]
    hops = hops_of(ordered_by or " ".join(map(ring_text, rings)))
    return Answer(
        ring=_text(ring),
        tree=_text(tree),
        channels=" ".join(map(ring_text, rings)),
        transports="".join(TRANSPORTS[pair_mechanism(seen, *hop)][0] for hop in hops),
    )


def _text(graph: SearchGraph) -> str:
    return graph_text(round(graph.rate_intra, 3), graph.type_intra.name, graph.orders)


def hops_of(channels: str) -> list[tuple[int, int]]:
    """Return the hops of the rings of `Answer.channels`, each once, in order."""
    rings = [[int(gpu, 16) for gpu in word] for word in channels.split()]
    return list(dict.fromkeys(hop for ring in rings for hop in neighbours(ring)))


def recorded() -> dict[tuple[str, int], Answer]:
    """Return the recorded answers by release and seed."""
    found = {}
    for line in lzma.decompress(RECORDED.read_bytes()).decode().splitlines():
        releases, seed, *answer = line.split("|")
        found |= {(release, int(seed)): Answer(*answer) for release in releases.split()}
    return found


def record(answers: dict[tuple[str, int], Answer]) -> None:
    """Write the answers; releases that answer alike share a line."""
    lines: dict[tuple[int, Answer], list[str]] = {}
    for (release, seed), answer in sorted(answers.items()):
        lines.setdefault((seed, answer), []).append(release)
    text = "".join(
        "|".join([" ".join(releases), str(seed), *msgspec.structs.astuple(answer)]) + "\n"
        for (seed, answer), releases in sorted(lines.items(), key=lambda item: item[0][0])
    )
    RECORDED.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


# NCCL's graph code without a GPU.


class TopoGraph(ctypes.Structure):
    """The begin of ncclTopoGraph (graph.h), the same in all of RELEASES, with room to spare."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("id", "pattern", "cross_nic", "collnet")),
        *((name, ctypes.c_int) for name in ("min_channels", "max_channels", "channels")),
        *((name, ctypes.c_float) for name in ("rate_intra", "rate_inter", "latency")),
        *((name, ctypes.c_int) for name in ("type_intra", "type_inter", "same", "hops")),
        ("ranks", ctypes.c_int * (1 << 18)),
    )


class RefusedError(Exception):
    """A function of NCCL that failed."""


class GraphCode:
    """The graph code of a released libnccl.so.2, whose symbols NVIDIA's packages keep."""

    def __init__(self, library: Path) -> None:
        os.environ["NCCL_IGNORE_DISABLED_P2P"] = "2"  # NVML, which is not here, is not asked
        self._library = ctypes.CDLL(str(library))
        number = ctypes.c_int()
        self._library.ncclGetVersion(ctypes.byref(number))
        self.version = version_text(number.value)
        listed = subprocess.run(["nm", library], check=True, capture_output=True, text=True)
        words = map(str.split, listed.stdout.splitlines())
        self._places = {found[2]: int(found[0], 16) for found in words if len(found) == 3}
        exported = ctypes.cast(self._library.ncclGetVersion, ctypes.c_void_p).value or 0
        self._base = exported - self._places["ncclGetVersion"]

    def call(self, name: str, *arguments) -> None:
        """Call a C++ function that returns ncclResult_t, by its name."""
        mangled = re.compile(rf"_ZL?{len(name)}{name}P[^.]*")
        found = next(filter(mangled.fullmatch, self._places))
        function = ctypes.CFUNCTYPE(ctypes.c_int, *(type(each) for each in arguments))
        code = function(self._base + self._places[found])(*arguments)
        if code != 0:
            raise RefusedError(f"{name} of NCCL {self.version} returned {code}")

    def reads(self, name: str) -> tuple[bool, float]:
        """Return whether NCCL reads an integer variable each time, and the seconds of a reading.

        Of NCCL_NO_CACHE the value at the first reading of any variable counts.
        """
        asked = name.removeprefix("NCCL_").replace("_", "").casefold()
        listed = {
            found[1].casefold(): place
            for symbol, place in self._places.items()
            if (found := re.fullmatch(r"_ZL?\d+ncclParam(\w+)v", symbol))
        }
        read = ctypes.CFUNCTYPE(ctypes.c_int64)(self._base + listed[asked])
        values = []
        for value in ("5", "6"):
            os.environ[name] = value
            values.append(read())
        seconds = min(timeit.repeat(read, number=_READINGS, repeat=50)) / _READINGS
        del os.environ[name]
        return values == [5, 6], seconds

    @contextmanager
    def computed(self, topology: str, gpus=GPUS, graph: Path | None = None):
        """Yield system, ring and tree of a communicator of one node, searched or from a file."""
        os.environ.pop("NCCL_GRAPH_FILE", None)
        if graph is not None:
            os.environ["NCCL_GRAPH_FILE"] = str(graph)
        elements = ctypes.create_string_buffer(64 << 20)
        ctypes.c_int.from_buffer(elements, 4).value = 1024  # ncclXml.maxNodes
        xml, system = ctypes.c_void_p(ctypes.addressof(elements)), ctypes.c_void_p()
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            file.write(fused(topology, gpus))
            file.flush()
            name = ctypes.c_char_p(file.name.encode())
            self.call("ncclTopoGetXmlFromFile", name, xml, ctypes.c_int(1))
        place = ctypes.c_void_p(ctypes.addressof(system))
        self.call("ncclTopoGetSystemFromXml", xml, place, ctypes.c_ulong(_HOST))
        self.call("ncclTopoComputePaths", system, ctypes.c_void_p())
        self.call("ncclTopoSearchInit", system)
        ring = TopoGraph(id=0, pattern=RING, min_channels=1, max_channels=_MOST_CHANNELS)
        self.call("ncclTopoCompute", system, ctypes.c_void_p(ctypes.addressof(ring)))
        most = ring.channels
        tree = TopoGraph(id=1, pattern=BALANCED_TREE, min_channels=most, max_channels=most)
        self.call("ncclTopoCompute", system, ctypes.c_void_p(ctypes.addressof(tree)))
        yield system, ring, tree
        self.call("ncclTopoFree", system)

    def answer(self, topology: str, gpus=GPUS, graph: Path | None = None) -> Answer:
        """Return the graphs for a communicator of one node, searched or loaded from a file."""
        texts = []
        with self.computed(topology, gpus, graph) as (_, *graphs):
            for found in graphs:
                ends = range(0, len(gpus) * (found.channels + 1), len(gpus))
                orders = [[gpus[rank] for rank in found.ranks[a:b]] for a, b in pairwise(ends)]
                rate = round(found.rate_intra, 3)
                texts.append(graph_text(rate, PathType(found.type_intra).name, orders))
        return Answer(*texts)


_HOST = 1
_SAME = ("numaid", "busid", "dev", "name", "target")


def fused(topology: str, gpus=GPUS) -> str:
    """Return a topology as ranks see it: each rank's part of the file, joined in rank order."""
    root, whole = ET.fromstring(topology), ET.Element("system", {"version": "1"})
    for rank, gpu in enumerate(gpus):
        part = copy.deepcopy(root)
        _trim(part, gpu)
        next(part.iter("gpu")).set("rank", str(rank))
        _join(whole, part)
    for cpu in whole:
        cpu.set("host_hash", hex(_HOST))
    for element in whole.iter():
        element.text = element.tail = "\n"
    return ET.tostring(whole, encoding="unicode")


def _trim(above: ET.Element, gpu: int) -> None:
    """Remove the other GPUs, cards that are not here, and whatever then leads to no device."""
    for child in list(above):
        _trim(child, gpu)
        other = child.tag == "gpu" and child.get("dev") != str(gpu)
        other |= child.tag == "net" and child.get("name") != "lo"
        if other or (child.tag in ("cpu", "pci", "nic") and not len(child)):
            above.remove(child)


def _join(whole: ET.Element, part: ET.Element) -> None:
    """Add what a rank sees and the ranks before it did not (ncclTopoFuseXml)."""
    for child in part:
        known = [
            each
            for each in whole
            if each.tag == child.tag and all(each.get(name) == child.get(name) for name in _SAME)
        ]
        if known:
            _join(known[0], child)
        else:
            whole.append(child)
