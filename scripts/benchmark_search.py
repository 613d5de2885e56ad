"""Comparison of search strategies for `scripts/benchmark-search`, all rates simulated.

Strategies search the same hops: NCCL 2.30 with NCCL_P2P_LEVEL=SYS and 8 ring channels. The row
`default` is default NCCL, the row `plan` the result of `tccl plan` over all settings. All of them
but `tccl` and `brute-force` first try NCCL's own order and the ascending order.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tccl_py.errors import InputError, SearchError
from tccl_py.files import pick
from tccl_py.model.cluster import NodeClass
from tccl_py.model.symmetry import automorphisms, natural_cuts
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.planning.planner import FEW_RING_COUNTS, RING_COUNTS, make_plan
from tccl_py.planning.request import DEFAULT_BUDGET, Task
from tccl_py.planning.settings_search import Candidate, rate_own
from tccl_py.search.problem import Budget, SearchProblem, count_ring_sets
from tccl_py.search.strategies import find_rings
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench, bench_of
from tests.planned import SEVERAL_GPUS
from tests.reference_strategies import SkippedError, brute_force, tccl

SETTINGS = Settings(p2p_level="SYS", channels=8)
FEW_GPUS = 8
SEARCH = Budget(sets=1000, idle_sets=100)
REFERENCES = {"tccl": tccl, "brute-force": brute_force}
LEAST_GAIN = {"asus-esc8000a-e13p": 1.25}
"""Least rate of a plan over default NCCL's; 1 elsewhere."""
COLUMNS = {
    "machine": 24,
    "strategy": 11,
    "rings": 5,
    "GB/s": 6,
    "bound": 6,
    "proven": 6,
    "sets": 6,
    "seconds": 7,
    "figures": 32,
}
"""Headings and widths of the table."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table; rates in GB/s. `whole` is false if a budget cut a run short.

    `seconds` is wall time; if `cpu_seconds` is much less, the machine was busy.
    """

    machine: str
    strategy: str
    rings: str
    gpus: int
    rate: float | None = None
    bound: float | None = None
    proven: bool = False
    sets: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    whole: bool = True
    note: str = ""

    @property
    def cells(self) -> list[str]:
        """Return the row as text."""
        if self.rate is None:
            return [self.machine, self.strategy, self.rings, "", "", "", "", "", self.note]
        sets = f"{self.sets}" if self.whole else f">={self.sets}"
        bound = "" if self.bound is None else f"{self.bound:.2f}"
        proven = "yes" if self.proven else "no" if bound else ""
        rate, took = f"{self.rate:.2f}", f"{self.seconds:.1f}"
        return [self.machine, self.strategy, self.rings, rate, bound, proven, sets, took, self.note]


class MachineRuns:
    """Runs on one machine, each without earlier measurements."""

    def __init__(self, name: str, tccl_seconds: float) -> None:
        self.name = name
        self.model: MachineModel = load_bundled(name)
        self.gpus = self.model.machine.gpu_indices
        self.few = len(self.gpus) <= FEW_GPUS
        self.counts = RING_COUNTS if self.few else FEW_RING_COUNTS
        self.tccl_seconds = tccl_seconds

    def rows(self) -> Iterator[Entry]:
        """Yield the rows of this machine as they are ready."""
        default = self._default()
        mark = "assumed" if default.assumed else "simulated"
        rings, rate = f"{len(default.rings.rings)}", default.rate_gbps
        yield self._row(strategy="default", rings=rings, rate=rate, sets=1, note=mark)
        yield self._plan()
        for counts in ((1,), self.counts):
            yield self._search("best-first", counts, default, SEARCH)
        yield self._tccl(default)
        for counts in ((1,), self.counts):
            yield self._search("brute-force", counts, default, Budget())
        yield self._search("nccl-order", self.counts, default, Budget())

    def _row(self, **facts: object) -> Entry:
        return msgspec.convert({"machine": self.name, "gpus": len(self.gpus), **facts}, Entry)

    def _default(self) -> Candidate:
        task = Task(
            host=NodeClass(name=self.name, **pick(self.model, "machine", "knowledge")),
            source=bench_of(Simulator(self.model)),
            gpus=self.gpus,
            ring_counts=self.counts,
            budget=DEFAULT_BUDGET,
        )
        own = rate_own(task).own
        return own.get("default", own["variables"])

    def _plan(self) -> Entry:
        source = Bench(Simulator(self.model))
        began, cpu = time.monotonic(), time.process_time()
        plan = make_plan(self.model.machine, self.model.knowledge, source)
        return self._row(
            strategy="plan",
            rings=_text(self.counts),
            rate=plan.rate_gbps,
            bound=plan.bound_gbps,
            proven=plan.proven,
            sets=plan.sets_measured,
            seconds=time.monotonic() - began,
            cpu_seconds=time.process_time() - cpu,
            note=f"{plan.gain('graph'):.2f} x default" + (", assumed" if plan.assumed else ""),
        )

    def _tccl(self, default: Candidate) -> Entry:
        # With 16 GPUs `tccl` reaches no ring in a minute: among equally fast prefixes, a priority
        # queue of measured prefixes is nearly a breadth-first search.
        if self.few:
            return self._search("tccl", (1,), default, Budget(seconds=self.tccl_seconds))
        states = count_ring_sets(self._problem((1,), default, Budget()).spaces[1], 1)
        return self._row(strategy="tccl", rings="1", note=f"skipped: {states} states")

    def _problem(self, counts: Sequence[int], default: Candidate, budget: Budget) -> SearchProblem:
        machine, knowledge = self.model.machine, self.model.knowledge
        return SearchProblem(
            spaces={
                k: hop_space(view(machine, knowledge, SETTINGS), rings_in_set=k) for k in counts
            },
            source=Simulator(self.model),
            symmetry=automorphisms(machine, knowledge),
            known=(tuple(ring.gpus for ring in default.rings.rings),),
            cuts=natural_cuts(machine, knowledge, gpus=self.gpus),
            budget=budget,
        )

    def _search(
        self, strategy: str, counts: Sequence[int], default: Candidate, budget: Budget
    ) -> Entry:
        row = {"strategy": strategy, "rings": _text(counts)}
        began, cpu = time.monotonic(), time.process_time()
        problem = self._problem(counts, default, budget)
        try:
            result = find_rings(problem, strategy=REFERENCES.get(strategy, strategy))
        except SkippedError as error:
            return self._row(**row, note=f"skipped: {error.states} states")
        except SearchError as error:
            return self._row(**row, note=f"skipped: {error}")
        seconds = time.monotonic() - began
        return self._row(
            **row,
            rate=result.rate_gbps,
            bound=result.bound_gbps,
            proven=result.proven,
            sets=result.sets_measured,
            seconds=seconds,
            cpu_seconds=time.process_time() - cpu,
            whole=budget.seconds is None or seconds < budget.seconds,
            note="assumed" if result.assumed else "simulated",
        )


def _text(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A requirement and its result."""

    wanted: str
    found: str
    met: bool


def checks(rows: Sequence[Entry]) -> Iterator[Check]:
    """Yield the requirements that the rows cover."""
    by_name: dict[str, list[Entry]] = {}
    for row in rows:
        by_name.setdefault(row.machine, []).append(row)
    for name, mine in by_name.items():
        default, plan = (_pick(mine, strategy) for strategy in ("default", "plan"))
        gain = (plan.rate or 0.0) / (default.rate or 1.0)
        least = LEAST_GAIN.get(name, 1.0)
        # Rates are sums of floating-point numbers: equal rates may differ in the last digit.
        yield Check(
            wanted=f"{name}: plan at least {least:.2f} x default",
            found=f"{gain:.2f} x",
            met=gain >= least - 1e-9,
        )
        if plan.gpus == FEW_GPUS:
            yield from _few(name, mine)
        elif plan.gpus > FEW_GPUS:
            yield _many(name, mine)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield Check(wanted="peak memory under 1 GB", found=f"{used:.0f} MiB", met=used < 1e9 / 2**20)


def _few(name: str, mine: Sequence[Entry]) -> Iterator[Check]:
    single, tccl, all_counts = _pick(mine, "best-first"), _pick(mine, "tccl"), _all_counts(mine)
    yield Check(
        wanted=f"{name}: best-first, 1 ring, at most a tenth of tccl's sets",
        found=f"{single.sets} of {'' if tccl.whole else 'at least '}{tccl.sets}",
        met=single.sets * 10 <= tccl.sets,
    )
    yield Check(
        wanted=f"{name}: best-first, {all_counts.rings} rings, at most 1,000 sets in 20 s",
        found=f"{all_counts.sets} in {_took(all_counts)}",
        met=all_counts.sets <= 1000 and all_counts.seconds <= 20,
    )


def _many(name: str, mine: Sequence[Entry]) -> Check:
    """Require search and plan within 120 s, each with its bound."""
    runs = [_all_counts(mine), _pick(mine, "plan")]
    bounds = [f"{run.bound:.2f}" if run.bound is not None else "no" for run in runs]
    return Check(
        wanted=f"{name}: best-first and plan within 120 s each, with a bound",
        found=f"{' and '.join(map(_took, runs))}, bounds {' and '.join(bounds)}",
        met=all(run.seconds <= 120 and run.bound is not None for run in runs),
    )


def _took(row: Entry) -> str:
    return f"{row.seconds:.1f} s ({row.cpu_seconds:.1f} s of CPU)"


def _pick(rows: Sequence[Entry], strategy: str) -> Entry:
    """Return the first row of a strategy."""
    return next(row for row in rows if row.strategy == strategy)


def _all_counts(rows: Sequence[Entry]) -> Entry:
    """Return the row of best-first over all ring counts."""
    return [row for row in rows if row.strategy == "best-first"][-1]


def main() -> int:
    """Print the table, then the requirements; return 1 if a requirement is not met."""
    parser = argparse.ArgumentParser(prog="scripts/benchmark-search", description=__doc__)
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help="bundled names; all if none")
    parser.add_argument("--tccl-seconds", type=float, default=60.0, help="budget of `tccl`")
    arguments = parser.parse_args()
    try:
        names = arguments.machines or SEVERAL_GPUS
        benches = [MachineRuns(name, arguments.tccl_seconds) for name in names]
    except InputError as error:
        parser.error(str(error))
    rows: list[Entry] = []
    print(_line(COLUMNS), _line(["-" * width for width in COLUMNS.values()]), sep="\n")
    for bench in benches:
        for row in bench.rows():
            rows.append(row)
            print(_line(row.cells), flush=True)
    print("\nAll rates are simulated.\n")
    results = list(checks(rows))
    for check in results:
        print(f"- {'met' if check.met else 'NOT MET'}: {check.wanted}: {check.found}")
    return 0 if all(check.met for check in results) else 1


def _line(cells: Iterable[str]) -> str:
    """Return a row of an aligned Markdown table."""
    padded = (f"{cell:{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))
    return f"| {' | '.join(padded)} |"


if __name__ == "__main__":
    sys.exit(main())
