"""What `scripts/benchmark-merge` runs: merges of large clusters, with chain rates drawn at random.

Tables are 64 x 64: 8 NICs with 8 landings each. `levels` have five different rates, as mechanisms
and links do; `measured` ones all differ, which is the hardest. 30 % of the chains do not exist.
Each merge runs in a process of its own, so that its peak memory is its own (imports included).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tccl_py.merge.any_order import merge_any_order
from tccl_py.merge.in_order import merge_in_order
from tccl_py.merge.switches import SwitchTree, merge_with_switches
from tccl_py.merge.tables import ChainTable, MergedRing

CROSSINGS = 64
NODES = 1_024
CLASSES = 40
PER_SWITCH = 32
LEVELS = (0.0, 6.0, 12.0, 24.0, 48.0)
CHANCES = (0.3, 0.3, 0.2, 0.15, 0.05)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A merge, and what it may take; None: nothing was asked for."""

    name: str
    merge: Callable[[], MergedRing]
    seconds: float | None = None
    megabytes: float | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came out, and what it took."""

    rate: float
    bound: float
    nodes: int
    seconds: float
    megabytes: float


def tables(kind: str, classes: int) -> list[ChainTable]:
    rng = np.random.default_rng(0)
    shape = (classes, CROSSINGS, CROSSINGS)
    if kind == "levels":
        rates = rng.choice(LEVELS, size=shape, p=CHANCES)
    else:
        rates = rng.uniform(0, 50, shape) * (rng.uniform(size=shape) < 0.7)
    return [ChainTable(name=f"class {c}", rates=rates[c]) for c in range(classes)]


def equal(nodes: int, kind: str) -> MergedRing:
    return merge_in_order(tables(kind, 1), [0] * nodes)


def mixed(nodes: int, kind: str) -> MergedRing:
    order = np.random.default_rng(1).integers(0, CLASSES, nodes).tolist()
    return merge_in_order(tables(kind, CLASSES), order)


def any_order(counts: Sequence[int], kind: str) -> MergedRing:
    return merge_any_order(tables(kind, len(counts)), counts)


def switched(nodes: int, classes: int, kind: str) -> MergedRing:
    names = [f"h{host}" for host in range(nodes)]
    drawn = np.random.default_rng(1).integers(0, classes, nodes).tolist()
    spans = [tuple(names[i : i + PER_SWITCH]) for i in range(0, nodes, PER_SWITCH)]
    leaves = [SwitchTree(name=f"s{i}", hosts=span) for i, span in enumerate(spans)]
    tree = SwitchTree(name="root", switches=tuple(leaves))
    return merge_with_switches(tables(kind, classes), dict(zip(names, drawn, strict=True)), tree)


def cases() -> list[Case]:
    few, rest = divmod(NODES, CLASSES)
    counts = [few + 1] * rest + [few] * (CLASSES - rest)
    found = []
    for kind in ("levels", "measured"):
        found += [
            Case(
                name=f"1,024 equal nodes, {kind}",
                merge=lambda kind=kind: equal(NODES, kind),
                seconds=1,
                megabytes=500,
            ),
            Case(
                name=f"10,000 equal nodes, {kind}",
                merge=lambda kind=kind: equal(10_000, kind),
                seconds=5,
            ),
            Case(
                name=f"1,024 nodes of 40 classes in a given order, {kind}",
                merge=lambda kind=kind: mixed(NODES, kind),
            ),
            Case(
                name=f"1,024 nodes of 40 classes in any order, {kind}",
                merge=lambda kind=kind: any_order(counts, kind),
                seconds=10,
            ),
            Case(
                name=f"1,024 nodes of 2 classes under 32 switches, {kind}",
                merge=lambda kind=kind: switched(NODES, 2, kind),
            ),
        ]
    return found


def measured(case: Case) -> Outcome:
    """One case, in this process."""
    began = time.monotonic()
    ring = case.merge()
    return Outcome(
        rate=ring.rate_gbps,
        bound=ring.bound_gbps,
        nodes=len(ring.order),
        seconds=time.monotonic() - began,
        megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    )


def in_own_process(number: int) -> Outcome:
    """One case, in a process started for it."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_numbered, (number,))


def _numbered(number: int) -> Outcome:
    return measured(cases()[number])


def verdict(case: Case, outcome: Outcome) -> str:
    """Whether the figures asked for are met; empty if there are none."""
    checks = [
        (case.seconds, outcome.seconds, "s"),
        (case.megabytes, outcome.megabytes, "MB"),
    ]
    asked = [(most, found, unit) for most, found, unit in checks if most is not None]
    met = all(found <= most for most, found, _ in asked)
    limits = ", ".join(f"<= {most:g} {unit}" for most, _, unit in asked)
    return f"{'met' if met else 'NOT MET'} ({limits})" if asked else ""


def main() -> int:
    """Print a line for each case; 1 if a figure asked for is not met."""
    parser = argparse.ArgumentParser(prog="scripts/benchmark-merge", description=__doc__)
    parser.parse_args()
    print(
        "| merge                                                     | GB/s    | bound   "
        "| seconds | MB    | asked for |"
    )
    missed = False
    for number, case in enumerate(cases()):
        outcome = in_own_process(number)
        says = verdict(case, outcome)
        missed |= says.startswith("NOT")
        print(
            f"| {case.name:57} | {outcome.rate:7.4f} | {outcome.bound:7.4f} "
            f"| {outcome.seconds:7.2f} | {outcome.megabytes:5.0f} | {says} |",
            flush=True,
        )
    print("\nRates are drawn at random.")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
