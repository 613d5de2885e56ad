"""Graph files of plans for random machines, their mutants, and what NCCL's own code does with them.

A case is a job: its environment and its nodes with their topology, GPUs and graph file.
"""

import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tccl_py.errors import SearchError
from tccl_py.model.machine import Knowledge
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.transport import final_channels
from tccl_py.nccl.validator import NodeJob, validate_cluster
from tccl_py.plan.cluster_planner import make_cluster_plan
from tccl_py.plan.parts import per_channel
from tccl_py.plan.planner import make_plan
from tccl_py.plan.writing import nccl_files
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import model_for
from tccl_py.simulator.source import Simulator
from tests.graph_judge import judged
from tests.random_machines import random_machine

SHORT = Budget(sets=60, idle_sets=15)
SUBSETS = 6
"""Smaller communicators that are tried of each plan."""


class Node(msgspec.Struct, frozen=True):
    """One node of a job."""

    topology: str
    gpus: tuple[int, ...]
    graph: str


class Case(msgspec.Struct, frozen=True):
    """A job, and the final rings that its files ask for, as ranks from rank 0 on."""

    name: str
    environment: dict[str, str]
    nodes: tuple[Node, ...]
    rings: tuple[tuple[int, ...], ...] = ()


def from_zero(ring):
    start = ring.index(0)
    return (*ring[start:], *ring[:start])


def planned_cases(seed: int) -> list[Case]:
    """Return the files of a plan for one random machine and, with NICs, for two or three of it."""
    rng = random.Random(seed)
    text, gpus = random_machine(rng)
    machine = parse_nccl_topology(text, where=f"machine {seed}")
    source = Simulator(model_for(machine))
    plan = make_plan(
        machine, Knowledge(), source, gpus=gpus, ring_counts=(1,), budget=SHORT
    )  # fmt: skip
    files = nccl_files(plan, Path("/"))
    graphs = {tuple(plan.gpus): files["graph.xml"]}
    for subset in rng.sample(plan.subsets, min(SUBSETS, len(plan.subsets))):
        name = "-".join(map(str, subset.gpus))
        graphs[subset.gpus] = files[f"subsets/graph-{name}.xml"]
    cases = []
    for some, graph in graphs.items():
        sm = min(gpu.sm for gpu in machine.gpus if gpu.index in some)
        orders = per_channel(plan.subset(some).rings, plan.settings.channels)
        rings = [from_zero([some.index(gpu) for gpu in order]) for order in orders]
        final = final_channels(Settings(), sm=sm, channels=len(rings))
        cases.append(
            Case(
                f"{seed}:{some}",
                environment(plan.settings),
                (Node(text, some, graph),),
                tuple(rings[number % len(rings)] for number in range(final)),
            )
        )
    if machine.nics and seed % 3 == 0:
        cases.append(cluster_case(seed, text, machine, source, hosts=rng.choice((2, 3))))
    return cases


def cluster_case(seed, text, machine, source, *, hosts) -> Case:
    reports = [HostReport(host=f"h{number}", machine=machine) for number in range(hosts)]
    cluster = cluster_of(reports, where="test")
    plan = make_cluster_plan(cluster, [source], ring_counts=(1,), budget=SHORT)
    files = nccl_files(plan, Path("/"))
    nodes, orders = [], []
    for host in plan.hosts:
        nodes.append(Node(text, plan.class_gpus[0], files[f"hosts/{host.name}.xml"]))
        chains = [chain.gpus for chain in plan.paths[host.path].chains]
        order = per_channel(chains, plan.settings.channels)
        orders.append(
            [[host.first_rank + plan.class_gpus[0].index(gpu) for gpu in one] for one in order]
        )
    rings = [from_zero([*itertools.chain(*parts)]) for parts in zip(*orders, strict=True)]
    final = final_channels(
        Settings(),
        channels=len(rings),
        sm=min(gpu.sm for gpu in machine.gpus),
        nodes=hosts,
        speed_intra=plan.rate_gbps / len(rings),
    )
    final_rings = tuple(rings[number % len(rings)] for number in range(final))
    return Case(f"{seed}:{hosts} hosts", environment(plan.settings), tuple(nodes), final_rings)


def answers(cases: list[Case]) -> list[dict]:
    """Return what NCCL's own code makes of the cases."""
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[str, str] = {}
        for case in cases:
            for node in case.nodes:
                if node.graph not in paths:
                    paths[node.graph] = f"{folder}/{len(paths)}.xml"
                    data = node.graph.encode("utf-8", "surrogateescape")
                    Path(paths[node.graph]).write_bytes(data)
        return judged(
            [
                (
                    case.environment,
                    [(node.topology, node.gpus, paths[node.graph]) for node in case.nodes],
                )
                for case in cases
            ]
        )


def trouble(case: Case, answer: dict) -> str:
    """Return what is wrong with NCCL's answer to files that are to be used, "" for nothing."""
    if answer.get("rc") != 0:
        return f"init fails: {answer}"
    if answer["badtree"] or answer["oob"]:
        return f"broken tree: {answer['badtree']}"
    rings = [from_zero(ring) for ring in answer["rings"]]
    if rings != list(case.rings):
        return f"rings {rings}, not {case.rings}"
    return ""


# Mutants

VALUES = ("-1", "0", "1", "2", "3", "4", "5", "31", "33", "65", "0x1", "0x7", "ff", "x", "", "1e9",
          "SYS", "NVL", "x" * 253, "x" * 254, "99999999999", "nan", "\u00e9")  # fmt: skip
PIECES = ("<", ">", '"', "/", " ", "\t", "\n", "=", "<!-- -->", "<a/>", "\0", "'", "<graph>")


def mutant(rng: random.Random, text: str) -> str:
    """Return a graph file with one to three small changes."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        text = rng.choice((_value, _value, _device, _line, _line, _attribute, _characters))(
            rng, text
        )
    return text


def _spans(text: str, begin: str, end: str) -> list[tuple[int, int]]:
    spans, at = [], text.find(begin)
    while at >= 0:
        stop = text.find(end, at + len(begin))
        if stop < 0:
            break
        spans.append((at + len(begin), stop))
        at = text.find(begin, stop + len(end))
    return spans


def _value(rng, text):
    spans = _spans(text, '="', '"')
    if not spans:
        return text
    start, stop = rng.choice(spans)
    return text[:start] + rng.choice(VALUES) + text[stop:]


def _device(rng, text):
    spans = _spans(text, ' dev="', '"')
    if not spans:
        return text
    start, stop = rng.choice(spans)
    return text[:start] + rng.choice((hex(rng.randrange(9)), str(rng.randrange(9)))) + text[stop:]


def _line(rng, text):
    """Leave out, double or move some lines."""
    lines = text.split("\n")
    start = rng.randrange(len(lines))
    stop = start + rng.choice((1, 1, 1, 2, 6))
    part = lines[start:stop]
    place = rng.randrange(len(lines))
    kept = rng.choice((lines[:start] + lines[stop:], lines))
    if rng.random() < 0.5:
        kept = kept[:place] + part * rng.choice((1, 1, 70)) + kept[place:]
    return "\n".join(kept)


def _attribute(rng, text):
    spans = _spans(text, " ", '"')
    if not spans:
        return text
    start, stop = rng.choice(spans)
    end = text.find('"', stop + 1)
    if rng.random() < 0.5:
        return text[: start - 1] + text[end + 1 :]
    extra = rng.choice((' rank="0"', ' rank="1"', ' rank="-1"', ' x="y"', ' dev="0"'))
    return text[: start - 1] + extra + text[start - 1 :]


def _characters(rng, text):
    place = rng.randrange(len(text) + 1)
    return text[:place] + rng.choice(PIECES) + text[place + rng.choice((0, 1)) :]


def mutants(rng: random.Random, cases: list[Case], count: int) -> Iterator[Case]:
    """Return changed copies of cases; all nodes get the same changes if their files are equal."""
    for number in range(count):
        case = rng.choice(cases)
        changed = {node.graph: mutant(rng, node.graph) for node in case.nodes}
        nodes = tuple(msgspec.structs.replace(n, graph=changed[n.graph]) for n in case.nodes)
        yield msgspec.structs.replace(case, name=f"{case.name} mutant {number}", nodes=nodes)


def verdict(case: Case):
    """Return the project's verdict on a case."""
    machines = {n.topology: parse_nccl_topology(n.topology, where="test") for n in case.nodes}
    jobs = [
        NodeJob(machine=machines[n.topology], knowledge=Knowledge(), gpus=n.gpus, graph=n.graph)
        for n in case.nodes
    ]
    return validate_cluster(jobs, environment=case.environment)


def compare_plans(seeds) -> tuple[int, list[str]]:
    """Return how many files there were and what NCCL would not run as planned."""
    count, wrong = 0, []
    for seed in seeds:
        try:
            cases = planned_cases(seed)
        except SearchError:
            continue
        for case, answer in zip(cases, answers(cases), strict=True):
            found = trouble(case, answer) or (
                "" if verdict(case).verdict == "used" else f"our verdict: {verdict(case)}"
            )
            count += 1
            wrong += [f"{case.name}: {found} {case.environment}"] if found else []
    return count, wrong


def compare_mutants(rng: random.Random, cases: list[Case], count: int):
    """Return the numbers of our verdicts, and mutants called used that NCCL does not run so.

    NCCL is asked about mutants called used alone: it takes about a second for each.
    """
    kinds: Counter[str] = Counter()
    used = []
    for case in mutants(rng, cases, count):
        ours = verdict(case)
        kinds[ours.verdict] += 1
        if ours.verdict == "used":
            used.append(msgspec.structs.replace(case, rings=ours.rings))
    wrong = []
    for case, answer in zip(used, answers(used), strict=True):
        found = trouble(case, answer)
        if found:
            wrong.append(f"{case.name}: {found}\n{case.nodes[0].graph}")
    return kinds, wrong
