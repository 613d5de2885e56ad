"""Benchmark of `scripts/benchmark-cluster`: merges of large clusters, and a whole plan.

Merges are of random 64 x 64 tables: 8 NICs with 8 placements of NIC buffers each. Tables of kind
`levels` have five different rates, as mechanisms and links do; in `measured` tables, the hardest
case, all rates differ. 30 % of the chains do not exist. Merges under wide uplinks, of two passes,
are of 24 x 24 tables. The plan is `tccl plan --simulate nvswitch-8gpu-8nic --nodes 1024` with its
files. Each case runs in a process of its own, for its own peak memory; seconds are the CPU's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from tccl_py.cli.main import app
from tccl_py.merge.rings import ChainTable, MergedRing, merge_in_order, merge_with_switches
from tccl_py.model.cluster import Cluster, Host, SwitchTree
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.plan.directory import nccl_files
from tccl_py.plan.load import load_plan
from tccl_py.plan.tables import ClassRates, KeptTable
from tccl_py.planning.join import plan_over
from tccl_py.planning.planner import make_cluster_plan
from tccl_py.planning.request import PlanRequest
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator

CROSSINGS = 64
NODES = 1_024
CLASSES = 40
PER_SWITCH = 32
MACHINE = "nvswitch-8gpu-8nic"
LEVELS = (0.0, 6.0, 12.0, 24.0, 48.0)
CHANCES = (0.3, 0.3, 0.2, 0.15, 0.05)


class MergeRates(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a case: rate and bound, GB/s, simulated sets, CPU seconds without preparation."""

    rate: float
    bound: float
    sets: int | None = None
    seconds: float | None = None


class Case(msgspec.Struct, frozen=True):
    """A benchmark case and its limits; None is no limit."""

    name: str
    run: Callable[[], MergeRates]
    seconds: float | None = None
    megabytes: float | None = None


class CaseOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a case, with time and memory."""

    rates: MergeRates
    seconds: float
    megabytes: float


def tables(kind: str, classes: int, crossings: int = CROSSINGS) -> list[ChainTable]:
    rng = np.random.default_rng(0)
    shape = (classes, crossings, crossings)
    if kind == "levels":
        rates = rng.choice(LEVELS, size=shape, p=CHANCES)
    else:
        rates = rng.uniform(0, 50, shape) * (rng.uniform(size=shape) < 0.7)
    return [ChainTable(name=f"class {c}", rates=rates[c]) for c in range(classes)]


def merged(ring: MergedRing) -> MergeRates:
    return MergeRates(rate=ring.rate_gbps, bound=ring.bound_gbps)


def equal(nodes: int, kind: str) -> MergeRates:
    return merged(merge_in_order(tables(kind, 1), [0] * nodes))


def mixed(nodes: int, kind: str) -> MergeRates:
    order = np.random.default_rng(1).integers(0, CLASSES, nodes).tolist()
    return merged(merge_in_order(tables(kind, CLASSES), order))


def any_order(counts: Sequence[int], kind: str) -> MergeRates:
    classes = {f"{c}.{i}": c for c, count in enumerate(counts) for i in range(count)}
    tree = SwitchTree(name="", hosts=tuple(classes))
    return merged(merge_with_switches(tables(kind, len(counts)), classes, tree))


def switched(
    nodes: int, classes: int, kind: str, crossings: int = CROSSINGS, uplink: float | None = None
) -> MergeRates:
    names = [f"h{host}" for host in range(nodes)]
    drawn = np.random.default_rng(1).integers(0, classes, nodes).tolist()
    spans = [tuple(names[i : i + PER_SWITCH]) for i in range(0, nodes, PER_SWITCH)]
    leaves = [
        SwitchTree(name=f"s{i}", hosts=span, uplink_gbps=uplink) for i, span in enumerate(spans)
    ]
    tree = SwitchTree(name="root", switches=tuple(leaves))
    hosts = dict(zip(names, drawn, strict=True))
    return merged(merge_with_switches(tables(kind, classes, crossings), hosts, tree))


def job(nodes: int, classes: int) -> MergeRates:
    """Plan a job by kept tables, and make its files; equal machines with rates of their own."""
    model = load_bundled(MACHINE)
    two = cluster_of([HostReport(host=name, machine=model.machine) for name in "ab"])
    kept_tables: list[KeptTable] = []
    budget = Budget(sets=100, idle_sets=15)
    source = Simulator(model)
    made = make_cluster_plan(two, [source], budget=budget, tables=kept_tables, gpus_per_job="8")
    rng = np.random.default_rng(0)
    tables = [slowed(kept_tables[0], f"class{number}", rng) for number in range(classes)]
    first = two.classes[0]
    node_classes = [msgspec.structs.replace(first, name=table.node_class) for table in tables]
    drawn = rng.integers(0, classes, nodes).tolist()
    hosts = tuple(Host(name=f"h{n}", node_class=number, slots=8) for n, number in enumerate(drawn))
    cluster = Cluster(hosts=hosts, classes=tuple(node_classes))
    pairs = list(zip(node_classes, tables, strict=True))
    began = time.process_time()
    plan = plan_over(
        cluster, [ClassRates(*pair) for pair in pairs], PlanRequest(strategy=made.strategy)
    )
    nccl_files(plan, Path("/job"))
    seconds = time.process_time() - began
    return MergeRates(rate=plan.rate_gbps, bound=plan.bound_gbps or 0.0, seconds=seconds)


def slowed(table: KeptTable, name: str, rng: np.random.Generator) -> KeptTable:
    """Return a table of another class, every rate of it lower by a random share."""
    replace = msgspec.structs.replace
    answers = []
    for answer in table.answers:
        share = rng.uniform(0.5, 1.0)
        gbps = tuple(tuple(rate * share for rate in row) for row in answer.gbps)
        answers.append(replace(answer, rate_gbps=answer.rate_gbps * share, gbps=gbps))
    return replace(table, node_class=name, answers=tuple(answers))


def whole_plan() -> MergeRates:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "plan"
        words = ["plan", str(directory), "--simulate", MACHINE, "--nodes", f"{NODES}"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            app(words, standalone_mode=False)
        plan = load_plan(directory)
    return MergeRates(rate=plan.rate_gbps, bound=plan.bound_gbps or 0.0, sets=plan.sets_measured)


def cases() -> list[Case]:
    few, remainder = divmod(NODES, CLASSES)
    counts = [few + 1] * remainder + [few] * (CLASSES - remainder)
    merges = []
    for kind in ("levels", "measured"):
        merges += [
            Case(f"1,024 equal nodes, {kind}", partial(equal, NODES, kind), 1, 500),
            Case(f"10,000 equal nodes, {kind}", partial(equal, 10_000, kind), 5),
            Case(
                f"1,024 nodes of 40 classes in a given order, {kind}", partial(mixed, NODES, kind)
            ),
            Case(
                f"1,024 nodes of 40 classes in any order, {kind}",
                partial(any_order, counts, kind),
                10,
            ),
            Case(
                f"1,024 nodes of 2 classes under 32 switches, {kind}",
                partial(switched, NODES, 2, kind),
            ),
            Case(
                f"1,024 nodes of 3 classes, 24 x 24, wide uplinks, {kind}",
                partial(switched, NODES, 3, kind, 24, 100.0),
                1,
            ),
        ]
    files = "by kept tables, files made"
    return [
        *merges,
        Case(f"job over 10,000 nodes of 40 classes {files}", partial(job, 10_000, CLASSES), 3, 500),
        Case(f"job over 1,024 equal nodes {files}", partial(job, NODES, 1), 1),
        Case("tccl plan of 1,024 nodes x 8 GPUs x 8 NICs", whole_plan, 40),
    ]


def measured(number: int) -> CaseOutcome:
    """Run one case in this process."""
    began = time.process_time()
    rates = cases()[number].run()
    return CaseOutcome(
        rates=rates,
        seconds=time.process_time() - began if rates.seconds is None else rates.seconds,
        megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    )


def in_own_process(number: int) -> CaseOutcome:
    """Run one case in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (number,))


def verdict(case: Case, outcome: CaseOutcome) -> str:
    """Return whether the case meets its limits, as text; empty without limits."""
    checks = [(case.seconds, outcome.seconds, "s"), (case.megabytes, outcome.megabytes, "MB")]
    limited = [(most, cost, unit) for most, cost, unit in checks if most is not None]
    met = all(cost <= most for most, cost, _ in limited)
    limits = ", ".join(f"<= {most:g} {unit}" for most, _, unit in limited)
    return f"{'met' if met else 'NOT MET'} ({limits})" if limited else ""


def main() -> int:
    """Print a line for each case; return 1 if a case misses a limit."""
    parser = argparse.ArgumentParser(prog="scripts/benchmark-cluster", description=__doc__)
    parser.parse_args()
    print(
        "| what                                                          | GB/s     | bound    "
        "| sets | CPU s   | MB    | asked for |"
    )
    missed = False
    for number, case in enumerate(cases()):
        outcome = in_own_process(number)
        says = verdict(case, outcome)
        missed |= says.startswith("NOT")
        print(
            f"| {case.name:61} | {outcome.rates.rate:8.4f} | {outcome.rates.bound:8.4f} "
            f"| {outcome.rates.sets or '':4} | {outcome.seconds:7.2f} | {outcome.megabytes:5.0f} "
            f"| {says} |",
            flush=True,
        )
    print("\nRates of merges are drawn at random, the others simulated.")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
