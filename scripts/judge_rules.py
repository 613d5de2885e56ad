"""Judge the rules of NCCL's releases, as this project has them, by released libraries.

`code LIBRARY...` compares default rings and trees of random PCIe machines of 8 GPUs with those of
the libraries' graph code, without a GPU. A LIBRARY is libnccl.so.2 of a package nvidia-nccl-cu13.
`plans LIBRARY...` has them load the graph files of plans for random machines, `mutants` random
changes of such files that `tccl validate` calls used. `sizes LIBRARY...` compares choices by size
with those of the libraries' cost models, and `record-sizes LIBRARY...` writes these for the tests.
`tuner LIBRARY...` has those from 2.31 on ask the plugin's tuner, which is told each choice in turn.
`reads LIBRARY...` has them read the variables of single communicators twice, and times that.
`ask FILE` makes communicators with the installed NCCL on 8 GPUs, real or virtual, whose bus ids are
those of `base`, and writes its answers; kernels are not needed. `base` prints a topology file for
virtual GPUs. `record FILE|LIBRARY...` adds answers to those of the tests, and `recorded` compares
all of these.
"""

import argparse
import os
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, MeasurementError
from tccl_py.nccl.asked import rank_environment, run_questions
from tccl_py.nccl.communicators import CommunicatorLog, Question, parse_log, same_rings
from tccl_py.nccl.graph_file import parse_graph_file
from tccl_py.nccl.versions import RING, TREE, known_versions, version_facts
from tccl_py.plan.directory import nccl_files
from tccl_py.plan.load import load_plan
from tests.judged_graph_files import compare_mutants, compare_plans, planned_cases
from tests.plugin.runs import plugin_library
from tests.random_machines import PRETENDED, pcie_machine
from tests.released_nccl import (
    GPUS,
    Answer,
    GraphCode,
    expected,
    graph_text,
    hops_of,
    record,
    recorded,
    ring_text,
)
from tests.released_tuning import TuningCode, compare_choices, compare_tuned, record_choices
from tests.topology_writer import topology_xml

PLANS = Path(__file__).parents[1] / "plans"
CONNECTED, RUN = 20, 100
"""Machines whose transports are asked for, which takes twice the time, and machines of a run."""
_BUS_ID = re.compile(r'((?:busid|target)=")0000:')
VARIABLES = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_DEBUG_SUBSYS": "INIT,GRAPH",
}


KINDS = (
    *("code", "plans", "mutants", "sizes", "record-sizes", "tuner", "reads"),
    *("ask", "base", "record", "recorded"),
)
MUTATED = (0, 1, 2, 3, 5, 6, 9, 12, 15, 30, 33)
"""Seeds of the machines whose files are mutated."""


class NcclLine(msgspec.Struct, frozen=True):
    """One answer of NCCL, or the error in place of it, for a machine or a plan's graph file."""

    release: str
    seed: int
    answer: Answer | None = None
    error: str = ""
    plan: str = ""


def main() -> None:
    """Run one kind of judgement; the exit status is 1 if less than 98 of 100 machines agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first machine")
    parser.add_argument("--seconds", type=float, default=1e6, help="begin nothing after these")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.machines)
    if options.kind == "base":
        print(pcie_machine(0), end="")
    elif options.kind == "ask":
        ask(options.paths[0], seeds, time.monotonic() + options.seconds)
    elif options.kind == "record":
        record({**recorded(), **dict(_answers(options.paths, seeds))})
    elif options.kind == "recorded":
        compare({key: (answer, pcie_machine(key[1])) for key, answer in recorded().items()})
    elif options.kind == "code":
        for code in map(GraphCode, options.paths):
            machines = {(code.version, seed): pcie_machine(seed) for seed in seeds}
            compare({key: (code.answer(text), text) for key, text in machines.items()})
    elif options.kind == "reads":
        sys.exit(sum(not reads_again(path) for path in options.paths))
    elif options.kind.endswith("sizes") or options.kind == "tuner":
        names = [f"{kind} {seed}" for kind in ("pcie", "any", "power") for seed in seeds]
        codes = map(TuningCode, options.paths)
        if options.kind == "tuner":
            for code in codes:
                compare_tuned(code, names, plugin_library())
            return
        versions = {code.version: compare_choices(code, names) for code in codes}
        if options.kind == "record-sizes":
            record_choices(versions)
    else:
        sys.exit(load(options.kind, [GraphCode(path) for path in options.paths], seeds))


def reads_again(path: Path) -> bool:
    """Return whether a library reads all variables anew that its release should."""
    uncached = version_facts(known_versions()[-1]).rereads
    os.environ["NCCL_NO_CACHE"] = ",".join(uncached)
    code, right = GraphCode(path), True
    for name in (*uncached, "NCCL_MIN_P2P_NCHANNELS"):
        again, seconds = code.reads(name)
        print(
            f"NCCL {code.version}: {name} read {'each time' if again else 'once'}, "
            f"{1e6 * seconds:.2f} us"
        )
        right &= again == (name in version_facts(code.version).rereads)
    return right


def load(kind: str, codes: Sequence[GraphCode], seeds: Sequence[int]) -> bool:
    """Have libraries load files of plans, or mutants of such files; return whether any is wrong."""
    if kind == "plans":
        count, wrong = compare_plans(codes, seeds)
        print(f"{len(seeds)} machines, {count} files, {len(wrong)} not loaded as planned")
    else:
        cases = [case for seed in MUTATED for case in planned_cases(seed)]
        kinds, wrong = compare_mutants(codes, random.Random(seeds[0]), cases, len(seeds))
        print(f"{len(seeds)} mutants, {dict(kinds)}, {len(wrong)} called used wrongly")
    for text in wrong:
        print(text)
    return bool(wrong)


def compare(answers: dict[tuple[str, int], tuple[Answer, str]]) -> None:
    """Print how many machines agree by release, and seeds of those that do not; may exit 1."""
    classes: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for (release, seed), (answer, machine) in answers.items():
        ours = expected(machine, release, ordered_by=answer.channels)
        classes[release][ours.difference(answer)].append(seed)
    bad = False
    for release, seeds_of in classes.items():
        count, equal = sum(map(len, seeds_of.values())), len(seeds_of.pop("", ()))
        print(f"NCCL {release}: {equal} of {count} machines are equal", flush=True)
        for name, seeds in seeds_of.items():
            print(f"    {name} differs: seeds {' '.join(map(str, seeds[:10]))}")
        bad |= equal < 0.98 * count
    if bad:
        sys.exit(1)


# Communicators


def ask(path: Path, seeds: Sequence[int], until: float) -> None:
    """Write the answers about plans and machines to a file, a line each, until the time is up."""
    runs = [seeds[at : at + RUN] for at in range(CONNECTED, len(seeds), RUN)]
    with path.open("wb") as file:
        for number, part in enumerate((range(0), seeds[:CONNECTED], *runs)):
            begun = time.monotonic()
            if begun > until:
                break
            lines = _machine_lines(part, connect=number == 1) if number else _plan_lines()
            file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
            file.flush()
            errors = [line.error for line in lines if line.error]
            print(f"{part}: {time.monotonic() - begun:.1f} s, {errors[:2]}", flush=True)


def _machine_lines(seeds: Sequence[int], *, connect: bool) -> list[NcclLine]:
    questions = [Question(gpus=GPUS, topology=pcie_machine(seed)) for seed in seeds]
    try:
        release, logs = _logs(questions, VARIABLES, connect=connect)
    except MeasurementError as error:
        # One of them may be at fault.
        if len(seeds) == 1:
            return [NcclLine("", seeds[0], error=str(error)[:400])]
        halves = seeds[: len(seeds) // 2], seeds[len(seeds) // 2 :]
        return [line for half in halves for line in _machine_lines(half, connect=connect)]
    return [_line(release, seed, answers) for seed, answers in zip(seeds, logs, strict=True)]


def _line(release: str, seed: int, logs: Sequence[CommunicatorLog], plan: str = "") -> NcclLine:
    try:
        return NcclLine(release, seed, _answer(logs, release), plan=plan)
    except (InputError, KeyError) as error:
        return NcclLine(release, seed, error=f"incomplete: {error}", plan=plan)


def _logs(
    questions: Sequence[Question], variables: dict[str, str], *, connect: bool
) -> tuple[str, list[list[CommunicatorLog]]]:
    """Return NCCL's version, and each question's logs by rank."""
    return run_questions(rank_environment(variables, connect=connect), questions)


def _answer(logs: Sequence[CommunicatorLog], release: str) -> Answer:
    """Return an answer from the ranks' logs and rank 0's dump."""
    log = parse_log("\n".join(rank.log for rank in logs), where="NCCL's log")
    dump = parse_graph_file(logs[0].dump, where="NCCL's dump", version=release)
    ring, tree = (
        graph_text(round(graph.speedintra, 3), graph.typeintra, graph.orders)
        for graph in (dump[RING], dump[TREE])
    )
    channels = " ".join(map(ring_text, log.rings_over(len(logs))))
    via = {(link.source, link.target): link.via[0] for link in log.connections}
    transports = "".join(via.get(hop, "?") for hop in hops_of(channels)) if via else ""
    return Answer(ring, tree, channels, transports)


def _plans() -> Iterator[tuple[str, Question, tuple[tuple[int, ...], ...]]]:
    """Yield the reference plans of at most 8 GPUs: name, question, and rings in rank order."""
    for path in sorted(PLANS.glob("*.json")):
        plan = load_plan(path)
        if len(plan.machine.gpus) > len(GPUS):
            continue
        # The GPUs get the pretended bus ids, and all else a domain of its own.
        text = _BUS_ID.sub(r"\g<1>0001:", topology_xml(plan.machine))
        for gpu in plan.machine.gpus:
            text = text.replace(gpu.bus_id.replace("0000:", "0001:", 1), PRETENDED[gpu.index])
        graph = nccl_files(plan, Path("/"))["graph.xml"]
        question = Question(gpus=plan.gpus, graph=graph, topology=text)
        yield path.stem, question, plan.choices["graph"].rings


def _plan_lines() -> list[NcclLine]:
    """Return a line for each plan; its error says what NCCL did not run as planned."""
    plans = list(_plans())
    variables = {**VARIABLES, "NCCL_P2P_LEVEL": "SYS"}
    try:
        release, logs = _logs([plan[1] for plan in plans], variables, connect=True)
    except MeasurementError as error:
        return [NcclLine("", -1, error=str(error)[:400], plan="all")]
    lines = []
    for (name, question, rings), logs_of_plan in zip(plans, logs, strict=True):
        line = _line(release, -1, logs_of_plan, name)
        words = line.answer.channels.split() if line.answer else []
        rings_run = [tuple(int(gpu, 16) for gpu in word) for word in words]
        right = rings_run and all(
            same_rings(ring, rings[number % len(rings)]) for number, ring in enumerate(rings_run)
        )
        fault = f"runs {rings_run}, not {rings} over {question.gpus}"
        lines.append(line if right else msgspec.structs.replace(line, error=line.error or fault))
    return lines


def _answers(
    paths: Sequence[Path], seeds: Sequence[int]
) -> Iterator[tuple[tuple[str, int], Answer]]:
    """Yield the answers in files of `ask`, and new ones of libraries."""
    answered = recorded()
    for path in paths:
        if path.suffix != ".jsonl":
            code = GraphCode(path)
            new = (seed for seed in seeds if (code.version, seed) not in answered)
            yield from (((code.version, seed), code.answer(pcie_machine(seed))) for seed in new)
            continue
        for data in path.read_bytes().splitlines():
            line = msgspec.json.decode(data, type=NcclLine)
            if line.answer is not None and not line.plan:
                yield (line.release, line.seed), line.answer


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
