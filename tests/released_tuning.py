"""What released libraries of NCCL choose at each size, by their own cost model, without a GPU.

A communicator is a block of zeros with the fields that the model reads. Their places come from the
debug data of NVIDIA's packages, which `gdb` prints.
"""

import ctypes
import json
import lzma
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tccl_py.model.machine import Knowledge
from tccl_py.nccl.cost_model import CostModel, cost_model
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import final_channels
from tccl_py.nccl.tuner import ALGORITHMS, COLLECTIVES, PROTOCOLS
from tccl_py.nccl.view import view
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tests.nccl_cases import CASES
from tests.plugin.mixtures import Environment
from tests.random_machines import pcie_machine, random_machine
from tests.released_nccl import GraphCode, RefusedError, TopoGraph

RECORDED = CASES / "nccl-choices.json.xz"
ROWS = tuple(product(range(len(COLLECTIVES)), (1 << doublings for doublings in range(10, 31))))
"""Functions by NCCL's numbers, and bytes."""

_FIELDS = ("nRanks", "nNodes", "rank", "localRanks", "maxLocalRanks", "minCompCap", "maxCompCap",
           "cpuArch", "cpuVendor", "topo", "maxTreePattern", "nChannels", "graphs")  # fmt: skip
_OLD = {"ncclComm": _FIELDS, "ncclTaskColl": ("func", "datatype", "trafficBytes")}
_NEW = {
    "ncclComm": (*_FIELDS, "tuner"),
    "ncclTuningInput_t": ("comm", "tuningMask", "func", "nBytes", "numPipeOps", "count", "maxCTAs"),
    "ncclTuningResult_t": ("timeUs", "algo", "proto", "nChannels"),
}
_TYPES = {
    **dict.fromkeys(("topo", "tuner", "comm", "tuningMask", "nBytes", "count"), ctypes.c_uint64),
    "timeUs": ctypes.c_float,
}
_ROOM = 4 << 20
_ALGORITHMS, _PROTOCOLS = 7, 3
_MOST_CTAS = 64
_SAME_TIME, _LEAST, _SHOWN = 1e-5, 0.98, 8


class Choice(NamedTuple):
    """NCCL's choice, by its numbers; `channels` are the most that the call may use."""

    algorithm: int
    protocol: int
    channels: int
    microseconds: float


class TuningCode(GraphCode):
    """The cost model of a released libnccl.so.2."""

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self._new = any("17ncclTuningCompute" in name for name in self._places)
        fields = _NEW if self._new else _OLD
        names = [(kind, name) for kind, names in fields.items() for name in names]
        lines = [f"print (long)&((struct {kind} *)0)->{name}" for kind, name in names]
        lines.append("print (long)sizeof(struct ncclTopoGraph)")
        asked = [word for line in lines for word in ("-ex", line)]
        command = ["gdb", "-batch", "-nx", *asked, str(library)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        places = [int(number) for number in re.findall(r"^\$\d+ = (\d+)$", shown, re.MULTILINE)]
        assert len(places) == len(lines), shown
        *places, self._graph_bytes = places
        self._offsets = dict(zip(names, places, strict=True))

    def _field(self, block, kind: str, name: str):
        place = self._offsets[kind, name]
        return _TYPES.get(name, ctypes.c_int).from_buffer(block, place)

    def _block(self, kind: str, **values: int):
        block = ctypes.create_string_buffer(_ROOM)
        for name, value in values.items():
            self._field(block, kind, name).value = value
        return block

    def choices(
        self, topology: str, rows: Iterable[tuple[int, int]] = ROWS, *, tuner: int = 0
    ) -> list[Choice]:
        """Return choices for rows of (function, bytes), over all GPUs of a machine.

        `tuner` is the address of a tuner plugin, which releases from 2.31 on ask.
        """
        sms = [int(each) for each in re.findall(r' sm="(\d+)"', topology)]
        least, most = min(sms), max(sms)
        with self.computed(topology, tuple(range(len(sms)))) as (system, ring, tree):
            count = ring.channels = tree.channels = min(ring.channels, tree.channels)
            comm = self._block(
                "ncclComm",
                **dict.fromkeys(("nRanks", "localRanks", "maxLocalRanks"), len(sms)),
                nNodes=1,
                rank=1,
                topo=system.value,
                minCompCap=least,
                maxCompCap=most,
                maxTreePattern=tree.pattern,
                nChannels=final_channels(Settings(version=self.version), sm=least, channels=count),
                **({"tuner": tuner} if tuner else {}),
            )
            at = ctypes.addressof(comm)
            cpu = (at + self._offsets["ncclComm", name] for name in ("cpuArch", "cpuVendor"))
            model = ctypes.c_int()
            self.call("ncclTopoCpuType", system, *map(ctypes.c_void_p, cpu), _address(model))
            graphs = at + self._offsets["ncclComm", "graphs"]
            for number, graph in enumerate((tree, ring)):
                to = graphs + number * self._graph_bytes
                ctypes.memmove(to, ctypes.addressof(graph), TopoGraph.ranks.offset)
            choose = self._prepared(comm, (least, most), graphs)
            return [choose(comm, *row) for row in rows]

    def _prepared(self, comm, sm: tuple[int, int], graphs: int):
        if self._new:
            if any("26ncclTuningCostModelPreInit" in name for name in self._places):
                self.call("ncclTuningCostModelPreInit", _address(comm))
            self.call("ncclTuningCostModelInit", _address(comm))
            self.call("ncclTuningSetThreadThresholds", _address(comm))
            return self._computed_choice
        places = (graphs + number * self._graph_bytes for number in range(_ALGORITHMS))
        pointers = (ctypes.c_void_p * _ALGORITHMS)(*places)
        self.call("ncclTopoInitTunerConstants", _address(comm))
        least, most = map(ctypes.c_int, sm)
        self.call("ncclTopoTuneModel", _address(comm), least, most, _address(pointers))
        return self._table_choice

    def _table_choice(self, comm, function: int, size: int) -> Choice:
        cells = _ALGORITHMS * _PROTOCOLS
        table = (ctypes.c_float * cells)(*[-1.0] * cells)
        for algorithm, protocol in product(range(2), range(_PROTOCOLS)):
            place = ctypes.addressof(table) + 4 * (_PROTOCOLS * algorithm + protocol)
            numbers = map(ctypes.c_int, (function, algorithm, protocol))
            pieces = ctypes.c_size_t(size), ctypes.c_int(1), ctypes.c_void_p(place)
            self.call("ncclTopoGetAlgoTime", _address(comm), *numbers, *pieces)
        task = self._block("ncclTaskColl", func=function)
        arguments = ctypes.c_size_t(size), _address(table), ctypes.c_void_p()
        self.call("topoGetAlgoInfo", _address(comm), _address(task), *arguments)
        place = self._offsets["ncclTaskColl", "trafficBytes"] + 8
        channels, _, algorithm, protocol = (ctypes.c_int8 * 4).from_buffer(task, place)
        return Choice(algorithm, protocol, channels, table[_PROTOCOLS * algorithm + protocol])

    def _computed_choice(self, comm, function: int, size: int) -> Choice:
        numbers = {
            "func": function,
            "nBytes": size,
            "count": size,
            "numPipeOps": 1,
            "maxCTAs": _MOST_CTAS,
        }
        mask = (1 << 2 * _PROTOCOLS) - 1
        at = ctypes.addressof(comm)
        asked = self._block("ncclTuningInput_t", comm=at, tuningMask=mask, **numbers)
        result = self._block("ncclTuningResult_t")
        self.call("ncclTuningCompute", _address(asked), _address(result))
        names = ("algo", "proto", "nChannels", "timeUs")
        return Choice(*(self._field(result, "ncclTuningResult_t", name).value for name in names))


def _address(value) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(value))


def named_machine(name: str) -> str:
    """Return a random machine: `pcie 3`, `any 3`, which may have NVLink, or `power 3`."""
    kind, seed = name.split()
    if kind == "pcie":
        return pcie_machine(int(seed))
    text = random_machine(random.Random(int(seed)), nics=False)[0]
    return re.sub(' arch="[^"]*"', ' arch="ppc64"', text) if kind == "power" else text


def model_of(topology: str, version: str) -> CostModel:
    """Return this project's model of default NCCL over all GPUs."""
    machine = parse_nccl_topology(topology, where="random.xml")
    return cost_model(view(machine, Knowledge(), Settings(version=version)))


def expected(model: CostModel, function: int, size: int) -> Choice:
    """Return what this project's model says of a row."""
    kind, expected_us = next(iter(model.times(COLLECTIVES[function], size).items()))
    numbers = ALGORITHMS.index(kind[0]), PROTOCOLS.index(kind[1])
    return Choice(*numbers, model.most_channels(*kind, size), expected_us)


Words = dict[str, list[str]]
"""NCCL's choices in the order of ROWS, each as a word, by machine."""


def word(choice: Choice) -> str:
    """Return a choice as a word: algorithm, protocol, channels."""
    return f"{ALGORITHMS[choice.algorithm]}/{PROTOCOLS[choice.protocol]}/{choice.channels}"


def compare_choices(code: TuningCode, names: Sequence[str]) -> Words:
    """Print how many rows are equal, in choice and in time, and return NCCL's choices."""
    found: Words = {}
    differences, rows, times = [], 0, 0
    for name in names:
        text = named_machine(name)
        try:
            model, theirs = model_of(text, code.version), code.choices(text)
        except RefusedError as error:
            print(f"{name}: {error}")
            continue
        found[name] = [word(choice) for choice in theirs]
        for row, choice in zip(ROWS, theirs, strict=True):
            ours = expected(model, *row)
            rows += 1
            times += abs(ours.microseconds / choice.microseconds - 1) < _SAME_TIME
            if word(ours) != word(choice):
                differences.append(
                    f"{name}: {COLLECTIVES[row[0]]} of {row[1]}: {ours} not {choice}"
                )
    same = rows - len(differences)
    print(
        f"NCCL {code.version}: {same} of {rows} choices of {len(found)} machines equal "
        f"({same / rows:.2%}), {times} times",
        *differences[:_SHOWN],
        sep="\n",
    )
    if same < _LEAST * rows:
        sys.exit(1)
    return found


class Tuner:
    """The plugin's tuner in this process, which is told what to choose."""

    def __init__(self, library: Path, version: str) -> None:
        plugin = ctypes.CDLL(str(library))
        environment = Environment.in_dll(plugin, "ncclEnvPlugin_v2")
        environment.init(*map(int, version.split(".")), None, None)
        self.told = (ctypes.c_int * 4).in_dll(plugin, "tccl_told")
        self.place = ctypes.addressof(ctypes.c_char.in_dll(plugin, "ncclTunerPlugin_v6"))

    def rows(self, numbers: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
        """Yield function and bytes; algorithm, protocol and channels are told before."""
        for function, size, *choice in numbers:
            self.told[:3] = choice
            yield function, size


def compare_tuned(code: TuningCode, names: Sequence[str], library: Path) -> None:
    """Print how often NCCL obeys the plugin's tuner as planned; exit 1 if it does not."""
    tuner, wrong, count = Tuner(library, code.version), [], 0
    kinds = [*product(range(len(ALGORITHMS)), range(len(PROTOCOLS)), (0, 1, 2, 64))]
    numbers = [(*row, *kind) for row in ROWS[::3] for kind in kinds]
    for name in names:
        text = named_machine(name)
        try:
            found = code.choices(text, tuner.rows(numbers), tuner=tuner.place)
        except RefusedError:
            continue
        model = model_of(text, code.version)
        for row, choice in zip(numbers, found, strict=True):
            right, count = tuned_word(model, row), count + 1
            wrong += [f"{name}, {row}: {word(choice)} not {right}"] if word(choice) != right else []
    same = count - len(wrong)
    print(f"NCCL {code.version}: {same} of {count} choices as told", *wrong[:_SHOWN], sep="\n")
    if wrong:
        sys.exit(1)


def tuned_word(model: CostModel, row: tuple[int, ...]) -> str:
    """Return what NCCL from 2.31 on does where the tuner is told a choice."""
    function, size, algorithm, protocol, channels = row
    collective, kind = COLLECTIVES[function], (ALGORITHMS[algorithm], PROTOCOLS[protocol])
    ignored = channels and collective == "all_gather"
    if ignored or model.expected_us(collective, *kind, size) is None:
        return word(expected(model, function, size))
    own = model.most_channels(*kind, size)
    return f"{kind[0]}/{kind[1]}/{min(channels or own, own)}"


def recorded_choices() -> dict[str, Words]:
    """Return the recorded choices by release."""
    return json.loads(lzma.decompress(RECORDED.read_bytes()))


def record_choices(choices: dict[str, Words]) -> None:
    """Write choices by release."""
    text = json.dumps(choices).encode()
    RECORDED.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
