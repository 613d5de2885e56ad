"""`tccl evaluate`: all collectives over sets of GPUs, in every arm of a plan."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, cast

import typer
from msgspec.structs import replace

from tccl_py.cli import options
from tccl_py.cli.options import flag, in_range, one_of, opt
from tccl_py.cli.output import ProgressLine, results
from tccl_py.cli.process import ANSWER_IS_NO, notice, notice_each, print_json, write_result
from tccl_py.cli.verify import hold_plan, pinned_names
from tccl_py.errors import InputError
from tccl_py.report.verification import evaluation_json, evaluation_lines
from tccl_py.sources.profiled import check_backend
from tccl_py.verify.evaluation import EVALUATED, Evaluation, csv_text
from tccl_py.verify.plans import JobOptions, evaluate_plan
from tccl_py.verify.record import LEAST_ROUNDS, MAX_ROUNDS
from tccl_py.verify.spec import COLLECTIVES, ELEMENT_BYTES, Collective, Dtype, parse_sizes


def evaluate(
    directory: options.Directory,
    *,
    gpus_per_job: Annotated[
        str | None, opt("LIST", "Beside all GPUs: numbers and sets, as 4,2,4-7,0+2.")
    ] = None,
    collectives: Annotated[str | None, opt("LIST", f"Of {', '.join(COLLECTIVES)}.")] = None,
    sizes: Annotated[str | None, opt("LIST", "64K,1M,16M,256M if not given.")] = None,
    dtype: Annotated[str, opt("NAME", "float32 or bfloat16.")] = "float32",
    rounds: Annotated[int, opt("N", "Rounds over each set of GPUs.")] = LEAST_ROUNDS,
    seconds: Annotated[float, opt("S", "After this no set is begun.")] = EVALUATED.seconds,
    csv: Annotated[Path | None, opt("FILE", "Write a row of each result as CSV.")] = None,
    no_checks: Annotated[bool, flag("--no-checks", "Do not compare results' values.")] = False,
    pin_env: Annotated[list[str] | None, opt("NCCL_NAME", "Variables that all jobs get.")] = None,
    backend: options.Backend = None,
    json: options.Json = False,
) -> None:
    """Evaluate a plan: all collectives by size over sets of GPUs, against default NCCL.

    Jobs of all arms are interleaved in rounds, as by `tccl verify`, over all GPUs of the plan,
    half, a quarter, or the sets of --gpus-per-job, after a check of every collective's values. For
    a cluster's plan, start it by mpirun or srun: sets are GPUs of each host, over all hosts, half
    of the hosts and so on. An estimate of the time is printed first; sets that --seconds do not
    suffice for are named.

    A simulated plan is evaluated by its model, unless --backend is given: large messages only,
    over every set of GPUs that a plan has rings for. Ring collectives have the bandwidth of each
    arm's rings; send/recv and all-to-all are transfers of all pairs at once. A cluster has ring
    collectives alone. Sizes and times are left out, as latency is not simulated.

    DIR/evaluate.json has all results; `tccl report` draws a heat map of them.

    Exit codes: 0; 1 wrong values or a failed job; 2 wrong use, or no plan for this machine.

    --json has the keys `machine`, `simulated`, `recommended`, `arms` (a list of `arm`, `cells`,
    `mean`, `least`, `most`: ratios to default NCCL), `cells` (a list of `hosts`, `gpus`,
    `collective`, `dtype`, `bytes`, `arm`, `us`, `gbps`, `ratio`, `low`, `high`), `wrong`,
    `failures`, `left_out`, `seconds`.

    Examples:

        tccl evaluate my-plan --csv my-plan.csv
        tccl evaluate my-plan --gpus-per-job 4,2,0+2 --collectives all_reduce --sizes 1M,256M
    """
    in_range("--rounds", rounds, MAX_ROUNDS // 2, least=LEAST_ROUNDS)
    in_range("--seconds", seconds, 86_400, least=0)
    one_of("--dtype", dtype, ELEMENT_BYTES)
    listed = COLLECTIVES if collectives is None else tuple(collectives.split(","))
    for name in listed:
        one_of("--collectives", name, COLLECTIVES)
    budget = replace(
        EVALUATED,
        collectives=cast("tuple[Collective, ...]", tuple(dict.fromkeys(listed))),
        dtype=cast(Dtype, dtype),
        rounds=rounds,
        seconds=seconds,
        checks=not no_checks,
    )
    if sizes is not None:
        budget = replace(budget, sizes=parse_sizes(sizes, "--sizes"))
    if csv is not None and (csv.is_dir() or not csv.absolute().parent.is_dir()):
        raise InputError(f"--csv {csv}", "is no file that can be made", "name a file in a folder")
    kind = None if backend is None else check_backend(backend)
    pinned = pinned_names(pin_env or ())
    with ExitStack() as stack:
        job = hold_plan(stack, directory, anywhere=lambda plan: plan.simulated and kind is None)
        asked = JobOptions(
            job=job,
            backend=kind,
            pinned=pinned,
            say=notice,
            watch=stack.enter_context(ProgressLine()).say,
        )
        found = evaluate_plan(directory, budget, asked, gpus=gpus_per_job)
    _write(found, directory, csv, json=json)
    if found.wrong or found.failures:
        raise typer.Exit(ANSWER_IS_NO)


def _write(found: Evaluation, directory: Path, csv: Path | None, *, json: bool) -> None:
    """Print an evaluation, and write its rows as CSV."""
    if csv is not None:
        write_result(csv_text(found), csv)
    if json:
        print_json(evaluation_json(found))
    else:
        for line in evaluation_lines(found):
            results().print(line, soft_wrap=True)
    notice(f"wrote {directory / 'evaluate.json'}" + ("" if csv is None else f" and {csv}"))
    notice_each(f"failed: {text}" for text in found.failures)
    notice_each(f"left out, the time is up: {text}" for text in found.left_out)
