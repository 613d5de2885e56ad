"""Graph files of plans for random machines, their mutants, and what released NCCL does with them.

A case is a communicator over GPUs of one machine, its variables and its graph file.
"""

import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tccl_py.errors import SearchError
from tccl_py.model.machine import Knowledge
from tccl_py.nccl.settings import environment
from tccl_py.nccl.validator import Verdict, validate
from tccl_py.plan.chains import per_channel
from tccl_py.plan.directory import nccl_files
from tccl_py.planning.parts import ALL_SUBSETS_UP_TO
from tccl_py.planning.planner import make_plan
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import model_for
from tccl_py.simulator.source import Simulator
from tests.random_machines import random_machine
from tests.released_nccl import Answer, GraphCode, RefusedError, ring_text

SHORT = Budget(sets=60, idle_sets=15)
SUBSETS = 6
"""Smaller communicators that are tried of each plan."""


class Case(msgspec.Struct, frozen=True):
    """A communicator with a graph file, and the channels that the file asks for."""

    name: str
    environment: dict[str, str]
    topology: str
    gpus: tuple[int, ...]
    graph: str
    orders: tuple[tuple[int, ...], ...] = ()


def planned_cases(seed: int) -> list[Case]:
    """Return the files of a plan for one random machine."""
    rng = random.Random(seed)
    text, gpus = random_machine(rng)
    machine = parse_nccl_topology(text, where=f"machine {seed}")
    source = Simulator(model_for(machine))
    more = {"ring_counts": (1,), "budget": SHORT, "subsets": len(gpus) <= ALL_SUBSETS_UP_TO or None}
    plan = make_plan(machine, Knowledge(), source, gpus=gpus, **more)
    files = nccl_files(plan, Path("/"))
    graphs = {tuple(plan.gpus): files["graph.xml"]}
    for subset in rng.sample(plan.subsets, min(SUBSETS, len(plan.subsets))):
        name = "-".join(map(str, subset.gpus))
        graphs[subset.gpus] = files[f"subsets/graph-{name}.xml"]
    variables = environment(plan.settings)
    return [
        Case(
            f"{seed}:{some}",
            variables,
            text,
            some,
            graph,
            tuple(per_channel(plan.subset(some).rings, plan.settings.channels)),
        )
        for some, graph in graphs.items()
    ]


def loaded(code: GraphCode, case: Case) -> Answer | str:
    """Return the graphs that NCCL loads, or how it fails; in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with tempfile.NamedTemporaryFile("wb", suffix=".xml") as file:
            file.write(case.graph.encode("utf-8", "surrogateescape"))
            file.flush()
            try:
                answer = code.answer(case.topology, case.gpus, Path(file.name))
                os.write(writing, msgspec.json.encode(answer))
            except RefusedError as error:
                os.write(writing, msgspec.json.encode(str(error)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return msgspec.json.decode(data, type=Answer | str) if data else f"exit status {status}"


def trouble(case: Case, answer: Answer | str) -> str:
    """Return what is wrong with NCCL's graphs from a file that is to be used, "" for nothing."""
    if isinstance(answer, str):
        return answer
    rings, trees = (text.split()[2:] for text in (answer.ring, answer.tree))
    wanted = [ring_text(order) for order in case.orders]
    if rings != wanted[: len(rings)] or len(rings) != len(wanted):
        return f"rings {rings}, not {wanted}"
    whole = sorted(ring_text(case.gpus))
    broken = len(trees) < len(rings) or any(sorted(tree) != whole for tree in trees)
    return f"broken trees {trees}" if broken else ""


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


def mutants(rng: random.Random, cases: Sequence[Case], count: int) -> Iterator[Case]:
    """Return cases with changed files."""
    for number in range(count):
        case = rng.choice(cases)
        name = f"{case.name} mutant {number}"
        yield msgspec.structs.replace(case, name=name, graph=mutant(rng, case.graph))


def verdict(case: Case) -> Verdict:
    """Return the project's verdict on a case."""
    machine = parse_nccl_topology(case.topology, where="test")
    return validate(case.graph, machine, Knowledge(), gpus=case.gpus, environment=case.environment)


def compare_plans(codes: Sequence[GraphCode], seeds: Sequence[int]) -> tuple[int, list[str]]:
    """Return how many files there were and what NCCL would not load as planned."""
    count, wrong = 0, []
    for seed in seeds:
        try:
            cases = planned_cases(seed)
        except SearchError:
            continue
        for case in cases:
            ours = verdict(case)
            found = "" if ours.verdict == "used" else f"our verdict: {ours}"
            count += 1
            for code in codes:
                found = found or trouble(case, loaded(code, case))
            wrong += [f"{case.name}: {found} {case.environment}"] if found else []
    return count, wrong


def compare_mutants(
    codes: Sequence[GraphCode], rng: random.Random, cases: Sequence[Case], count: int
) -> tuple[Counter[str], list[str]]:
    """Return the numbers of our verdicts, and mutants called used that NCCL does not load so."""
    kinds: Counter[str] = Counter()
    wrong = []
    for case in mutants(rng, cases, count):
        ours = verdict(case)
        kinds[ours.verdict] += 1
        if ours.verdict != "used":
            continue
        # Final channels are the file's channels twice.
        rings = ours.rings[: len(ours.rings) // 2]
        orders = tuple(tuple(case.gpus[rank] for rank in ring) for ring in rings)
        used = msgspec.structs.replace(case, orders=orders)
        found = next(filter(None, (trouble(used, loaded(code, case)) for code in codes)), "")
        wrong += [f"{case.name}: {found}\n{case.graph}"] if found else []
    return kinds, wrong
