"""Cost of plans for `scripts/plan-cost`: counts by phase, and an estimate of the time on GPUs.

No GPU is needed. A source answers as a measured machine does: flows that should be equal differ,
samples spread, and no bound holds by construction. With --unlike no two GPUs are equal, so that no
set is answered by symmetry. Sets, questions to NCCL and files are counted; CPU seconds are this
machine's. The estimate in seconds is

    workers + rounds of questions x question + question + further files of a job x file
    + measurements / sets a second + CPU

by the costs of single steps that were recorded on GPUs (4 H200, 8 virtual ones), see UNITS. Where
default NCCL is recommended, the first round answers the question by size as well. It is assumed,
and was not timed, that a round of questions at the same time takes as long as a question. Workers
started beside NCCL's ranks made both slower on 8 virtual GPUs of one (20 s for 13).
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from tccl_py.cli.plan import HOST_SETS
from tccl_py.errors import InputError
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import TransferSet
from tccl_py.nccl.asked import MOST_RANKS
from tccl_py.nccl.graph_search import DefaultRings, default_rings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import view
from tccl_py.plan.directory import graph_files
from tccl_py.plan.plan import Plan
from tccl_py.planning import parts, planner, study
from tccl_py.planning.installed_nccl import MOST_FILES
from tccl_py.planning.planner import make_plan
from tccl_py.planning.request import DEFAULT_BUDGET
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator

MACHINES = ("h200x4-vm", "asus-esc8000a-e13p")
MOST_SECONDS = {4: 20.0, 8: 60.0}
"""Seconds that a plan of so many GPUs may take."""
SAMPLES = 9
PHASES = {"rate_own": "default NCCL, variables", "subset_rings": "rings of smaller sets"}
PHASES |= {"_rate": "gains of smaller sets", "_by_variables": "gains of smaller sets"}
PHASES |= {"limit_gbps": "the machine's limit"}
SEARCH = "search under settings"


class Units(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of single steps on GPUs, as recorded; `sets_per_s` was 20 to 50."""

    workers_s: float = 5.0
    question_s: float = 4.4
    further_file_s: float = (13.6 - 4.4) / 10
    sets_per_s: float = 30.0


UNITS = Units()


class MeasuredLike:
    """A source with the rates of a model, and the irregularities of measurements.

    `spread` is the relative deviation of each flow from the model, the same in all sets, `noise`
    that of samples.
    """

    simulated = False

    def __init__(self, model: MachineModel, *, spread: float, noise: float) -> None:
        self._simulator, self._spread, self._noise = Simulator(model), spread, noise
        self.times = 0
        self.seconds = 0.0

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Answer each set."""
        begun = time.process_time()
        answers = [self._measure(transfers) for transfers in sets]
        self.seconds += time.process_time() - begun
        return answers

    def _measure(self, transfers: TransferSet) -> Measurement:
        self.times += 1
        (exact,) = self._simulator.measure([transfers])
        samples = tuple(
            tuple(
                float(rate * _factors(f"{flow}", self._spread, 1)[0] * factor) for factor in noise
            )
            for number, (flow, (rate,)) in enumerate(
                zip(transfers.flows, exact.samples_gbps, strict=True)
            )
            for noise in [_factors(f"{self.times} {number} {flow}", self._noise, SAMPLES)]
        )
        return msgspec.structs.replace(
            exact, samples_gbps=samples, simulated=False, settled=True, source="plan-cost"
        )


def _factors(key: str, deviation: float, count: int) -> Any:
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
    return np.exp(np.random.default_rng(seed).normal(0.0, deviation, count))


class Cost(msgspec.Struct, kw_only=True):
    """The cost of a phase."""

    times: int = 0
    searches: int = 0
    cpu_s: float = 0.0


class Ledger:
    """Costs by phase, while a plan is made."""

    def __init__(self, source: MeasuredLike) -> None:
        self._source, self._phase, self._since = source, SEARCH, time.process_time()
        self._before = (0, 0.0)
        self.phases: dict[str, Cost] = {}
        self.questions: dict[Settings, DefaultRings] = {}
        self.rounds = 0

    def close(self) -> None:
        """Book what was spent since the last change of phases, the source's own time aside."""
        cost = self.phases.setdefault(self._phase, Cost())
        times, seconds = self._source.times, self._source.seconds
        cost.times += times - self._before[0]
        clock = time.process_time()
        cost.cpu_s += clock - self._since - (seconds - self._before[1])
        self._since, self._before = clock, (times, seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book what a block spends to a phase."""
        self.close()
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self.close()
            self._phase = outer

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the planner's phases and searches."""
        with ExitStack() as stack:
            for name, phase in PHASES.items():
                module = planner if hasattr(planner, name) else parts
                watched = self._watched(getattr(module, name), phase)
                stack.enter_context(patch.object(module, name, watched))
            searching = self._counted(study.find_rings)
            stack.enter_context(patch.object(study, "find_rings", searching))
            yield
            self.close()

    def _watched(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            with self.phase(phase):
                return function(*arguments, **named)

        return watched

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.phases.setdefault(self._phase, Cost()).searches += 1
            return function(*arguments, **named)

        return counted


def planned(model: MachineModel, options: argparse.Namespace) -> tuple[Plan, Ledger]:
    """Plan a machine as if it were measured, and count."""
    machine = model.machine
    if options.unlike:
        names = (msgspec.structs.replace(gpu, name=f"GPU {gpu.index}") for gpu in machine.gpus)
        machine = msgspec.structs.replace(machine, gpus=tuple(names))
    source = MeasuredLike(model, spread=options.spread, noise=options.noise)
    ledger = Ledger(source)

    def own_rings(choices: Sequence[Settings]) -> list[DefaultRings]:
        new = [settings for settings in dict.fromkeys(choices) if settings not in ledger.questions]
        ledger.rounds += -(-len(new) // max(1, MOST_RANKS // len(machine.gpus)))
        for settings in new:
            ledger.questions[settings] = default_rings(view(machine, model.knowledge, settings))
        return [ledger.questions[settings] for settings in choices]

    budget = msgspec.structs.replace(DEFAULT_BUDGET, sets=options.sets)
    more: dict[str, Any] = {"pinned_env": {"NCCL_P2P_DISABLE": "1"}} if options.no_p2p else {}
    with ledger.watching():
        plan = make_plan(
            machine, model.knowledge, source, own_rings=own_rings, budget=budget, **more
        )
    return plan, ledger


def report(plan: Plan, ledger: Ledger) -> bool:
    """Print costs and estimate; return whether a plan of so many GPUs is as quick as is asked."""
    count = len(plan.gpus)
    print(f"\n{plan.machine.name}, {count} GPUs: {plan.recommended}, {plan.rate_gbps:.2f} GB/s")
    print(f"{plan.sets_measured} sets, {len(plan.subsets)} smaller sets of GPUs in the plan")
    print(f"{'phase':24} {'measurements':>12} {'searches':>8} {'CPU s':>6}")
    for phase, cost in ledger.phases.items():
        print(f"{phase:24} {cost.times:12} {cost.searches:8} {cost.cpu_s:6.1f}")
    times = sum(cost.times for cost in ledger.phases.values())
    cpu_s = sum(cost.cpu_s for cost in ledger.phases.values())
    files = len(graph_files(plan))
    if files > MOST_FILES:
        files = len({len(gpus) for gpus in graph_files(plan)})
    jobs = max(1, MOST_RANKS // count)
    parts = {
        "workers": UNITS.workers_s,
        f"{len(ledger.questions)} questions to NCCL in {ledger.rounds} rounds": ledger.rounds
        * UNITS.question_s,
        f"choices by size, {files} graph files loaded": 0.0
        if plan.recommended == "default"
        else UNITS.question_s + max(0, -(-files // jobs) - 1) * UNITS.further_file_s,
        f"{times} measurements at {UNITS.sets_per_s:g} a second": times / UNITS.sets_per_s,
        "CPU": cpu_s,
    }
    seconds = sum(parts.values())
    words = " + ".join(f"{part:.1f} ({name})" for name, part in parts.items())
    most = MOST_SECONDS.get(count)
    against = "" if most is None else f", {'within' if seconds <= most else 'ABOVE'} {most:g} s"
    print(f"estimate on GPUs: {seconds:.0f} s{against} = {words}")
    return most is None or seconds <= most


def main() -> int:
    """Print the cost of each machine's plan; return 1 if an estimate is above what is asked."""
    parser = argparse.ArgumentParser(
        prog="scripts/plan-cost", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("machines", nargs="*", metavar="MACHINE", default=MACHINES)
    parser.add_argument("--sets", type=int, default=HOST_SETS, help="as --max-sets")
    parser.add_argument("--spread", type=float, default=0.01, help="of flows that should be equal")
    parser.add_argument("--noise", type=float, default=0.01, help="of samples")
    parser.add_argument("--unlike", action="store_true", help="no two GPUs are equal")
    parser.add_argument("--no-p2p", action="store_true", help="all jobs have NCCL_P2P_DISABLE=1")
    parser.add_argument("--profile", action="store_true", help="print where CPU time goes as well")
    options = parser.parse_args()
    try:
        models = [load_bundled(name) for name in options.machines]
    except InputError as error:
        parser.error(str(error))
    quick = True
    for model in models:
        profile = cProfile.Profile() if options.profile else None
        with profile or ExitStack():
            plan, ledger = planned(model, options)
        quick &= report(plan, ledger)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return 0 if quick else 1


if __name__ == "__main__":
    sys.exit(main())
