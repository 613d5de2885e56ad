"""`tccl workload`, and the recording of `tccl run --record`."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote

from msgspec.structs import replace
from rich.console import Console

from tccl_py.cli import options
from tccl_py.cli.options import arg, opt, refuse
from tccl_py.cli.output import print_table, results
from tccl_py.cli.process import check_result_file, notice, notice_each, print_json
from tccl_py.errors import InputError, size_text, spell
from tccl_py.workloads.record import (
    is_one_rank,
    log_folder,
    log_variables,
    recorded_logs,
    recording_cost,
    run_job,
)
from tccl_py.workloads.sources import open_workload
from tccl_py.workloads.workload import BUNDLED, MAX_NAME, Workload, write_workload

_ROWS = 40


def workload(
    names: list[str] = arg("NAME|FILE", "A bundled workload, a workload's file, logs, or folders."),
    *,
    ranks: int | None = opt("N", "Ranks of a bundled workload; 8 if not given."),
    output: Path | None = options.OUTPUT,
    json: bool = options.JSON,
) -> None:
    """Show the collectives of a job's step: bytes, groups of ranks, calls.

    Files are of all ranks of one job: NCCL's logs (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,COLL),
    or traces of PyTorch's profiler. Steps are told by repetition; what
    comes before and after is left out.

    Examples:

        tccl workload mixture-of-experts --ranks 4
        tccl workload job.json
        tccl workload job.json.logs -o job.json
    """
    check_result_file("--output", output)
    shown = open_workload(names, ranks=8 if ranks is None else ranks)
    if names[0] not in BUNDLED:
        refuse({"--ranks": ranks}, "is for a bundled workload", "a file has its own")
    if output is not None:
        shown = replace(shown, name=output.stem[:MAX_NAME])
        write_workload(shown, output)
    if json:
        print_json(shown)
    else:
        print_workload(results(), shown)


def print_workload(console: Console, workload: Workload) -> None:
    """Print a workload as a table, its largest rows first."""
    steps = f", {spell(workload.steps, 'step')}" if workload.steps else ""
    ranks = spell(workload.ranks, "rank")
    console.print(f"{workload.name}: {ranks}{steps}, from {workload.source}")
    rows = sorted(workload.rows, key=lambda row: -row.bytes * row.calls)
    lines = [("collective", "dtype", "size", "groups", "calls a step", "MB a step")]
    lines += [
        (
            row.collective,
            row.dtype,
            size_text(row.bytes),
            ", ".join(
                f"{number} x {spell(ranks, 'rank')}"
                for ranks, number in Counter(map(len, row.groups)).items()
            ),
            f"{row.calls:.6g}",
            f"{row.bytes * row.calls / 1e6:.3f}",
        )
        for row in rows[:_ROWS]
    ]
    print_table(console, lines)
    if len(rows) > _ROWS:
        console.print(f"and {spell(len(rows) - _ROWS, 'smaller row')}")
    notice_each(workload.notices)


def record_job(command: Sequence[str], environment: Mapping[str, str], output: Path) -> int:
    """Run a job, write what it communicates to `output`, and return the job's exit code.

    Where several of these commands run one job, one has to read the logs of all when it has ended.
    """
    one_rank = is_one_rank(environment)
    folder = log_folder(output, shared=one_rank)
    variables = log_variables(folder, environment, notice)
    names = f"{quote(str(folder))} -o {quote(str(output))}"
    later = f"the logs stay in {folder}; `tccl workload {names}` reads those of all hosts"
    begun = time.monotonic()
    try:
        code = run_job(command, {**environment, **variables})
    except (OSError, ValueError):
        # Logs in it are those of other ranks.
        with suppress(OSError):
            folder.rmdir()
        raise
    seconds = time.monotonic() - begun
    if one_rank:
        notice(f"{later} once the job has ended")
        return code
    try:
        logs = recorded_logs(folder)
        cost = recording_cost(logs, seconds)
        recorded = open_workload([str(folder)], name=output.stem[:MAX_NAME])
        write_workload(recorded, output)
    except InputError as error:
        with suppress(OSError):
            # It stays where there are logs.
            folder.rmdir()
        if not folder.is_dir():
            later = "the job's ranks need NCCL_DEBUG_FILE as it is in this environment"
        fault = f"the job ended with code {code} and was not recorded: {error.what}"
        if code:
            notice(f"{fault}; {later}")
            return code
        raise InputError(error.where, fault, f"{error.right}; {later}") from error
    print_workload(results(stderr=True), recorded)
    notice(f"wrote {output}; {cost}")
    shutil.rmtree(folder, ignore_errors=True)
    return code
