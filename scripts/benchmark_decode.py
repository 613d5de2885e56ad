"""Steps like those of a decoding language model, by default NCCL, a plan, and the tuned plan.

usage: scripts/benchmark-decode DIR [--rounds N] [--out FILE]

A step is a CUDA graph of 16 tensor-parallel layers with two all-reduces each, in bfloat16. Jobs of
all arms are fresh processes, interleaved; the tuned plan is what the NCCL plugin makes of DIR.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tccl_py.delivery.plugin import plugin_exports
from tccl_py.errors import InputError, MeasurementError, size_text
from tccl_py.experiments.calls import capture_graph, time_calls, warm_up
from tccl_py.experiments.comparison import LEAST_ROUNDS, MAX_ROUNDS, compare, row_seconds
from tccl_py.experiments.jobs import Arm, ConcurrentJobs, Launcher, round_order
from tccl_py.experiments.plans import launcher_of
from tccl_py.experiments.spec import JobResult, JobSpec, Row, RowTimes, batches, rows_of
from tccl_py.experiments.target import read_target
from tccl_py.plan.results import load_tuning, plan_in
from tccl_py.rank_processes.rank import (
    Communicator,
    join,
    read_spec,
    slots_file,
    time_slots,
    write_result,
)

LAYERS, REPLAYS, GRAPHS = 16, 5, 5
HIDDEN, BATCHES = (4096, 8192), (1, 2, 4, 8, 16, 32, 64)
ARMS = ("default", "plan", "tuned")
_LARGEST = 1 << 30
"""Bytes of a job for the number of concurrent jobs: four of them have room."""


def main() -> None:
    """Run as a rank of a job, or as its controller."""
    try:
        rank_main() if sys.argv[1:2] and sys.argv[1].endswith("spec.json") else control()
    except InputError as error:
        sys.exit(f"benchmark-decode: {error}")


# The controller.


def control() -> None:
    parser = argparse.ArgumentParser(prog="benchmark-decode", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=10, help="jobs of each arm")
    parser.add_argument("--out", type=Path, help="all times as JSON")
    call = parser.parse_args()
    if not LEAST_ROUNDS <= call.rounds <= MAX_ROUNDS:
        raise InputError(f"--rounds {call.rounds}", "is out of range", f"{LEAST_ROUNDS} to 40")
    plan = plan_in(call.directory)
    if not plan.cluster.closes:
        raise InputError(str(call.directory), "is the plan of a cluster", "name one machine's")
    if load_tuning(plan, call.directory) is None:
        right = "`tccl verify --tune` it first"
        raise InputError(str(call.directory), "has no table by message size", right)
    target = read_target(plan, call.directory)
    chosen = target.arm(plan.recommended)
    variables = {n: v for n, v in chosen.variables.items() if n != "NCCL_GRAPH_FILE"}
    tuned = msgspec.structs.replace(
        chosen, variables=variables | plugin_exports(plan, call.directory), graphs={}
    )
    asked_for = Launcher(keep=tuple(plan.pinned_env), say=print)
    with launcher_of(plan, call.directory, asked_for) as launcher:
        rank_launcher = msgspec.structs.replace(launcher, program="scripts.benchmark_decode")
        jobs = ConcurrentJobs(rank_launcher, JobSpec(rows=rows_of((_LARGEST,))))
        rounds = []
        for times in _rounds(jobs, (target.arms[0], chosen, tuned), call.rounds):
            rounds.append(times)
            if call.out:  # After each round: a machine may be taken away.
                rows = [dict(zip(ARMS, arms, strict=True)) for arms in rounds]
                call.out.write_bytes(msgspec.json.encode(rows))
    _print(rounds)


Times = dict[str, float]
"""Seconds of a step by mode."""


def _rounds(jobs: ConcurrentJobs, arms: tuple[Arm, ...], count: int) -> Iterator[list[Times]]:
    """Yield the times of each arm's job, the slowest rank's, for each round."""
    for number in range(count):
        print(f"round {number + 1} of {count}", file=sys.stderr)
        times_of = {}
        for arm, outcome in jobs.run(round_order(arms, number)):
            if isinstance(outcome, MeasurementError):
                raise InputError("a job", f"failed: {outcome}", "see NCCL's log")
            times = {row.mode: seconds for row, (seconds,) in row_seconds([outcome]).items()}
            times_of[id(arm)] = times
        yield [times_of[id(arm)] for arm in arms]


def _print(rounds: list[list[Times]]) -> None:
    table = Table("step", "all-reduce", "default us", "plan us", "tuned us", "plan", "tuned")
    for mode in rounds[0][0]:
        times = [[round_times[at][mode] for round_times in rounds] for at in range(len(ARMS))]
        ratios = [compare([arm], [times[0]])[0] for arm in times[1:]]
        hidden, batch = map(int, mode.split(" x "))
        table.add_row(
            mode,
            size_text(2 * hidden * batch),
            *(f"{median(arm) * 1e6:.0f}" for arm in times),
            *(f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" for ratio in ratios),
        )
    Console(width=140).print(table)
    print("ratios: speed over default NCCL, with 95 % intervals")


# A rank.


def rank_main() -> None:
    spec, rank, folder = read_spec(JobSpec)
    world = spec.world
    communicator = join("nccl", folder, rank=rank, world=world, local_rank=rank)
    slot = time_slots(slots_file(folder), spec.slot, rank)
    warm_up(communicator)
    steps: list[RowTimes] = []
    for hidden in HIDDEN:
        with slot():
            layer = Layer(communicator, hidden)
        for batch in BATCHES:
            with slot():
                layer.prepare(batch)
            times = []
            for _ in range(GRAPHS):
                with slot(), capture_graph(communicator, layer.step) as replay:
                    lasted = time_calls(communicator, replay, lambda: _times(replay))
                    times.append(lasted / REPLAYS)
            steps.append(batches(Row(mode=f"{hidden} x {batch}"), times))
    version = str(communicator.torch.__version__)
    result = JobResult(rank=rank, torch=version, times=tuple(steps))
    communicator.dist.destroy_process_group()
    write_result(folder, rank, result)


def _times(replay: Any) -> None:
    for _ in range(REPLAYS):
        replay()


class Layer:
    """A tensor-parallel layer, whose weights serve all layers: they are larger than any cache."""

    def __init__(self, communicator: Communicator, hidden: int) -> None:
        self._communicator, self._hidden = communicator, hidden
        part = hidden // communicator.world
        shapes = ((hidden, 3 * part), (part, hidden), (hidden, 4 * part), (4 * part, hidden))
        self._weights = [self._made(*shape) / math.sqrt(hidden) for shape in shapes]

    def _made(self, *shape: int) -> Any:
        torch = self._communicator.torch
        return torch.randn(shape, dtype=torch.bfloat16, device=self._communicator.device)

    def prepare(self, batch: int) -> None:
        """Make a batch, and run two steps: NCCL connects, and cuBLAS chooses its kernels."""
        self._state = self._made(batch, self._hidden)
        for _ in range(2):
            self.step()
        self._communicator.wait()

    def step(self) -> None:
        """Run all layers: attention without its cache, then the multilayer perceptron."""
        reduce, state = self._communicator.dist.all_reduce, self._state
        attend, mix, up, down = self._weights
        for _ in range(LAYERS):
            mixed = (state @ attend)[:, : mix.shape[0]] @ mix
            reduce(mixed)
            state = (state + mixed) * 0.5
            grown = (state @ up).relu_() @ down
            reduce(grown)
            state = (state + grown) * 0.5


if __name__ == "__main__":
    main()
