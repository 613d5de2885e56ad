"""Random machines as texts in the disguises of pastes: the same machine is read again."""

from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.health.nccl_report import read_report
from tccl_py.health.pasted import _pairs, _read_tests
from tccl_py.model.cards import cards
from tccl_py.nccl.paths import path_types
from tccl_py.readers.nvidia_smi import has_matrix, parse_nvidia_smi
from tccl_py.readers.pasted import plain
from tests.effort import calls_at_most

LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
CARDS = [f"NVIDIA {card.name}" for card in cards() if "Quadro" not in card.name]
CPUS = {
    "": "",
    "AuthenticAMD": "Architecture:  x86_64\nVendor ID:  AuthenticAMD\nCPU family:  25\n",
    "GenuineIntel": "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n",
}


@st.composite
def machines(draw):
    """A PCI tree's relations, NUMA nodes that fit them, cards, bus ids, P2P and a CPU."""
    count = draw(st.integers(1, 6))
    places = draw(st.lists(st.tuples(*[st.integers(0, 1)] * 4), min_size=count, max_size=count))
    cells = {}
    for a, b in combinations(range(count), 2):
        same = next((n for n in range(4) if places[a][n] != places[b][n]), 4)
        cells[a, b] = LEVELS[4 - same]
    return {
        "gpus": count,
        "cells": cells,
        "numa": [place[0] for place in places],
        "names": draw(st.lists(st.sampled_from(CARDS), min_size=count, max_size=count)),
        "buses": draw(st.lists(st.integers(1, 255), min_size=count, max_size=count, unique=True)),
        "p2p": draw(st.none() | st.booleans()),
        "cpu": draw(st.sampled_from(sorted(CPUS))),
    }


def header(machine, more=""):
    return "\t" + "\t".join(f"GPU{i}" for i in range(machine["gpus"])) + more


def topo(machine):
    lines = [header(machine, "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID")]
    for i in range(machine["gpus"]):
        row = ["X" if i == j else machine["cells"][min(i, j), max(i, j)]
               for j in range(machine["gpus"])]  # fmt: skip
        numa = machine["numa"][i]
        lines.append(f"GPU{i}\t" + "\t".join(row) + f"\t{16 * numa}-{16 * numa + 15}\t{numa}\tN/A")
    return "\n".join(lines) + "\n"


def granted(machine):
    if machine["p2p"] is None:
        return ""
    status = "OK" if machine["p2p"] else "GNS"
    rows = [f"GPU{i}\t" + "\t".join("X" if i == j else status for j in range(machine["gpus"]))
            for i in range(machine["gpus"])]  # fmt: skip
    return "\n".join(["nvidia-smi topo -p2p r", header(machine), *rows]) + "\n"


def listed(machine):
    return "".join(f"GPU {i}: {name} (UUID: GPU-{i}e)\n" for i, name in enumerate(machine["names"]))


def collect_env(machine):
    named = "".join(f"GPU {i}: {name}\n" for i, name in enumerate(machine["names"]))
    return "GPU models and configuration: \n" + named


def table(machine):
    pairs = enumerate(zip(machine["names"], machine["buses"], strict=True))
    return "".join(
        f"|   {i}  {name:<28} Off |   00000000:{bus:02X}:00.0 Off |                  N/A |\n"
        for i, (name, bus) in pairs
    )


def query(machine):
    pairs = enumerate(zip(machine["names"], machine["buses"], strict=True))
    rows = [f"{i}, {name}, 00000000:{bus:02X}:00.0" for i, (name, bus) in pairs]
    return "index, name, pci.bus_id\n" + "\n".join(rows) + "\n"


def devices(machine):
    pairs = enumerate(zip(machine["names"], machine["buses"], strict=True))
    return "".join(
        f"Device: {i}, {name}, pciBusID: {bus:x}, pciDeviceID: 0, pciDomainID:0\n"
        for i, (name, bus) in pairs
    )


def nccl_tests(machine):
    return "".join(
        f"#  Rank {i:2} Group  0 Pid   7 on box device {i:2} [0x{bus:02x}] {name}\n"
        for i, (name, bus) in enumerate(zip(machine["names"], machine["buses"], strict=True))
    )


NAMED = {listed: False, collect_env: False, table: True, query: True, devices: True,
         nccl_tests: False}  # fmt: skip
"""Whether bus ids stand in it."""


def markdown(text):
    rows = []
    for line in text.splitlines():
        cells = line.split("\t")
        rows.append("| " + " | ".join(cells) + " |" if "GPU" in line and "\t" in line else line)
        if line.startswith("\t") and "Affinity" in line:
            rows.append("|" + " --- |" * len(cells))
    return "\n".join(rows)


def run_together(text):
    """Only the matrix, as its rows are told by their labels."""
    lines = text.splitlines()
    rows = [n for n, line in enumerate(lines) if "\t" in line and "GPU" in line]
    first = next((n for n in rows if "Affinity" in lines[n]), None)
    if first is None:
        return text
    end = first
    while end + 1 in rows:
        end += 1
    return "\n".join([*lines[:first], " ".join(lines[first : end + 1]), *lines[end + 1 :]])


def each_line(prefix):
    return lambda text: "\n".join(prefix + line for line in text.splitlines())


DISGUISES = {
    "markdown": markdown,
    "quote": each_line("> "),
    "fence": lambda text: f"```\n{text}\n```",
    "byte order mark": lambda text: "\ufeff" + text,
    "no-break spaces": lambda text: text.replace("\t", "\xa0\xa0"),
    "spaces": lambda text: text.expandtabs(8),
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "colours": lambda text: text.replace("GPU0\t", "\x1b[4mGPU0\t", 1) + "\x1b[0m",
    "lost escapes": lambda text: text.replace("\tGPU0", "\t[4mGPU0", 1).replace("ID\n", "ID[0m\n"),
    "rank's prefix": each_line("[rank0]: "),
    "time's prefix": each_line("2026-01-05 10:11:12,345 INFO "),
    "pod's prefix": each_line("(APIServer pid=12) "),
    "rows run together": run_together,
    "prose": lambda text: f"GPU0 and GPU1 are on the left, slow.\n\n{text}\nAny idea?",
    "legend": lambda text: text + "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing\n",
}


@settings(max_examples=250, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_machine_is_read_from_its_texts_in_any_disguise(data):
    machine = data.draw(machines())
    form = data.draw(st.sampled_from(sorted(NAMED, key=lambda f: f.__name__)))
    parts = [topo(machine), granted(machine), form(machine), CPUS[machine["cpu"]]]
    text = "\n".join(data.draw(st.permutations(parts)))
    worn = data.draw(st.lists(st.sampled_from(sorted(DISGUISES)), max_size=3, unique=True))
    for name in worn:
        text = DISGUISES[name](text)
    found, knowledge = parse_nvidia_smi(text, where="paste.txt")
    assert [gpu.name for gpu in found.gpus] == machine["names"]
    assert all(gpu.link.gbps and gpu.sm for gpu in found.gpus)
    if NAMED[form]:
        assert [gpu.bus_id for gpu in found.gpus] == [
            f"0000:{n:02x}:00.0" for n in machine["buses"]
        ]
    assert {node.vendor for node in found.numa_nodes} == {machine["cpu"]}
    assert len(found.numa_nodes) == len(set(machine["numa"]))
    types = path_types(found)
    for (a, b), told in machine["cells"].items():
        assert types[f"G{a}", f"G{b}"].name == ("PHB" if told == "NODE" else told)
        if machine["p2p"] is not None:
            assert knowledge.can_access(found, a, b) == machine["p2p"]
    assert parse_nvidia_smi("\n".join(parts), where="paste.txt")[0] == found


@st.composite
def logs(draw):
    """NCCL's print of a machine, with the uplink of each GPU, and a ring."""
    gpus = draw(st.integers(2, 6))
    rates = draw(st.lists(st.sampled_from([1.5, 3.0, 6.0, 12.0, 24.0, 48.0]),
                          min_size=gpus, max_size=gpus))  # fmt: skip
    cpus = draw(st.integers(1, 2))
    behind = draw(st.lists(st.booleans(), min_size=gpus, max_size=gpus))
    lines = ["=== System : maxBw 48.0 totalBw 48.0 ==="]
    for cpu in range(cpus):
        lines.append(f"CPU/0-{cpu} (1/2/-1)")
        for rank in range(cpu, gpus, cpus):
            leaf = f"PCI[{rates[rank]}] - GPU/0-{16 * (rank + 1):x}000 ({rank})"
            if behind[rank]:
                lines += [f"+ PCI[48.0] - PCI/0-{16 * (rank + 1) + 1:x}000 (1000c0101000100b)",
                          " " * 14 + "+ " + leaf]  # fmt: skip
            else:
                lines.append("+ " + leaf)
    lines.append("==========================================")
    ring = draw(st.permutations(range(gpus)))
    lines += [f"Channel {n:02}/02 : {' '.join(map(str, ring))}" for n in range(2)]
    via = draw(st.sampled_from(["SHM/direct/direct", "P2P/CUMEM", "P2P/IPC", "NET/Socket/0"]))
    for a, b in zip(ring, [*ring[1:], ring[0]], strict=True):
        lines.append(f"Channel 00/0 : {a}[{a}] -> {b}[{b}] via {via}")
    return (
        gpus,
        rates,
        behind,
        tuple(ring),
        via,
        [f"box:7:9 [0] NCCL INFO {line}" for line in lines],
    )


LOGS = ("quote", "fence", "byte order mark", "carriage returns", "rank's prefix", "time's prefix",
        "pod's prefix", "prose")  # fmt: skip


@settings(max_examples=150, derandomize=True)
@given(data=st.data())
def test_a_log_says_the_same_in_any_disguise(data):
    gpus, rates, behind, ring, via, lines = data.draw(logs())
    # Another rank's lines may stand between.
    lines = [line for pair in lines for line in (pair, "box:8:8 [1] NCCL INFO comm 0x1 ok")]
    text = "\n".join(lines)
    for name in data.draw(st.lists(st.sampled_from(LOGS), max_size=3, unique=True)):
        text = DISGUISES[name](text)
    log = read_report(plain(text))
    assert log.rings == (ring, ring)
    assert {hop.via for hop in log.hops} == {via}
    assert len(log.hops) == gpus
    assert [gpu.index for gpu in log.machine.gpus] == list(range(gpus))
    assert log.uplinks_gbps == {str(rank): rate for rank, rate in enumerate(rates)}
    assert len(log.machine.bridges) == sum(behind)


HOSTILE = [
    "-" * 10**6 + "x",
    " " * 10**6 + "x",
    "GPU0 " * 10**5,
    "GPU0 X " * 10**5,
    "NCCL INFO " * 10**5,
    "a:1:1 [0] NCCL INFO " * 10**4,
    "\nNCCL INFO === System" * 10**4,
    "NCCL INFO Channel 00/02 : 0 1\n" * 10**4,
    "Bidirectional P2P=Enabled " + "Bandwidth " * 10**5,
    "Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)\n D\\D " + "0 " * 10**5,
    "1 1 float sum -1 " + "1 " * 10**5,
    "41:00.0 VGA " + "NVIDIA Corporation [" * 10**5,
    "GPU 0: " + "a" * 10**6,
    "0, NVIDIA " + ", 41:00" * 10**5,
    "index, pcie.link.gen.max\n" + '"' * 10**5,
    "> " * 10**5,
    "\x1b[" * 10**5,
    "[4" * 10**5,
    "Vendor ID:" * 10**5,
    "topo -p2p " * 10**5,
    "\ufeff" * 10**5,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_read_or_refused_within_limits(text):
    with calls_at_most(3_000_000):
        for reader in (
            lambda: parse_nvidia_smi(text, where="paste.txt"),
            lambda: read_report(text),
            lambda: has_matrix(plain(text)),
            lambda: list(_read_tests(text)),
            lambda: list(_pairs(text, None)),
        ):
            try:
                reader()
            except InputError as error:
                assert len(str(error)) < 500


@settings(max_examples=150, derandomize=True)
@given(text=st.text(alphabet=st.sampled_from("GPU0X PHB\tNCCL INFO:[]|->.1\n"), max_size=400))
def test_any_text_gives_a_report_or_a_sentence(text):
    for form in (text, f"a:1:1 [0] NCCL INFO {text}"):
        try:
            read_report(form)
            parse_nvidia_smi(form, where="paste.txt")
        except InputError as error:
            assert str(error)
