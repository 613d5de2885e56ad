"""`tccl plan`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tccl_py.cli.arguments import (
    MACHINE_HELP,
    JsonOption,
    NcclOption,
    gpus_argument,
    notice,
    print_json,
    results,
)
from tccl_py.cli.measure import simulation_header
from tccl_py.cli.plan_text import plan_json, print_plan
from tccl_py.cli.progress import ProgressLine
from tccl_py.errors import InputError
from tccl_py.plan.directory import open_journal, output_directory, write_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.planner import DEFAULT_BUDGET, make_plan
from tccl_py.runtimes.nccl.versions import LATEST
from tccl_py.search.problem import Budget
from tccl_py.search.strategies import STRATEGIES
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.source import Simulator

INTERRUPTED = 130
_MAX_RINGS = 16


def plan(
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="DIR", help="Where the plan's files go; a new one."),
    ],
    *,
    simulate: Annotated[
        str | None,
        typer.Option(metavar="MACHINE", help=f"Plan by a model's rates. {MACHINE_HELP}"),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="GPUs to join, as 0,2,5 or 0-3; all if not given."),
    ] = None,
    nccl: NcclOption = LATEST,
    rings: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="How many rings together, as 1,2,4; 1,2,4 by default."),
    ] = None,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(STRATEGIES)}.")
    ] = "best-first",
    max_sets: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Sets to measure at most while settings and rings are searched; tuning channels, "
            "subsets and the comparison with a free choice take some more.",
        ),
    ] = DEFAULT_BUDGET.sets or 1000,
    max_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds to spend at most on one search.")
    ] = None,
    noise: Annotated[
        float, typer.Option(metavar="F", help="Spread of simulated samples, 0 to 1.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the noise.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a plan that is already in DIR.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Find the best rings for a machine and write the files that make NCCL use them.

    DIR then holds plan.json, the journal of measurements, the machine, and below nccl/ graph files
    for all GPUs and for subsets of them, nccl.conf and env.sh. Ctrl-C keeps the best so far; the
    same command again goes on from the journal.

    Example:

        tccl plan -o my-plan --simulate asus-esc8000a-e13p
    """
    if simulate is None:
        raise InputError(
            "plan", "cannot measure hardware in this version", "give --simulate MACHINE"
        )
    model = load_machine(simulate)
    chosen = gpus_argument(gpus, model.machine)
    counts = _ring_counts(rings)
    budget = _budget(max_sets, max_seconds)
    header = simulation_header(model, noise=noise, seed=seed)
    source = Simulator(model, noise=noise, seed=seed)
    with output_directory(output, force=force) as journal:
        with (
            open_journal(source, journal, header, force=force) as journalled,
            ProgressLine() as line,
        ):
            source.resume(journalled.times_known)
            for text in journalled.notices:
                notice(text)
            made = make_plan(
                model.machine,
                model.knowledge,
                journalled,
                gpus=chosen,
                version=nccl,
                ring_counts=counts,
                strategy=strategy,
                budget=budget,
                reporter=line,
            )
        if not made.cancelled:
            write_plan(made, output, model=model)
    _finish(made, output, json)


def _finish(made: Plan, output: Path, json: bool) -> None:
    if made.cancelled:
        notice(f"interrupted: the best so far follows; the same command goes on from {output}")
    if json:
        print_json(plan_json(made))
    else:
        print_plan(made, results())
    if made.cancelled:
        raise typer.Exit(INTERRUPTED)
    notice(f"wrote {output}")


def _ring_counts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise InputError(f"--rings {text[:40]!r}", "is no list of numbers", "write 1,2,4")
    counts = tuple(sorted({int(part) for part in parts if len(part) < 6}))
    if not counts or counts[0] < 1 or counts[-1] > _MAX_RINGS:
        raise InputError(f"--rings {text[:40]!r}", "is out of range", f"1 to {_MAX_RINGS} rings")
    return counts


def _budget(sets: int, seconds: float | None) -> Budget:
    if sets < 1:
        raise InputError("--max-sets", f"is {sets}", "measure at least one set")
    # The comparison is written so that NaN fails it.
    if seconds is not None and not 0 < seconds < float("inf"):
        raise InputError("--max-seconds", f"is {seconds}", "a number of seconds above 0")
    return Budget(sets=sets, seconds=seconds, idle_sets=DEFAULT_BUDGET.idle_sets)
