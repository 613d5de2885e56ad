"""Rank program of a job by nccl-tests, for hosts without torch; and the options and table of these.

usage: tccl_py.experiments.nccl_tests SPEC.json RANK

One process of a program, as all_reduce_perf, drives all GPUs (`-g N`): rank 0 runs it, and writes
the results of all ranks. A size's time is the mean of the program's times out of place and, except
all-to-all, in place. Source of the options and of the table: README of NVIDIA/nccl-tests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from tccl_py.errors import InputError, visible
from tccl_py.experiments.spec import (
    COLLECTIVES,
    KIB,
    PROGRAMS,
    JobResult,
    JobSpec,
    WrongValue,
    batches,
)
from tccl_py.nccl.communicators import parse_log
from tccl_py.rank_processes.rank import read_spec, write_result
from tccl_py.rank_processes.tasks import LOGS, nccl_log

NO_TORCH = "none"
"""How the version of torch begins in results of these programs."""
_CHECKED = tuple(KIB << shift for shift in range(0, 17, 4))
"""Sizes of the run that compares values."""
_ROW = re.compile(
    r"[ \t]+(?P<size>[0-9]{1,16})[ \t]+[0-9]{1,16}[ \t]+(?P<dtype>[a-z0-9_]{1,20})"
    r"[ \t]+\S{1,20}[ \t]+-?[0-9]{1,6}[ \t]+(?P<rest>[^#\n]{1,300})",
    re.ASCII,
)
_DEVICE = re.compile(r"#.{0,200}\bdevice +[0-9]{1,4} \[[^\]]{1,40}\] (?P<name>[^\n]{1,100})")
_FIELDS = 4
"""Time in us, two bandwidths, and the number of wrong values: out of place, then in place."""
_MAX_OUTPUT = 4 << 20


class Line(NamedTuple):
    """A row of the program's table: seconds of a call, and wrong values (None: not compared)."""

    bytes: int
    dtype: str
    seconds: tuple[float, ...]
    wrong: int | None


def find_program(name: str) -> Path:
    """Return the path of a program of nccl-tests. Raises InputError: another one, or none there."""
    where = f"program {name!r}"
    if Path(name).name not in PROGRAMS:
        raise InputError(where, "is no program of nccl-tests", f"one of {', '.join(PROGRAMS)}")
    path = shutil.which(name)
    if path is None:
        raise InputError(where, "is not there", "name its path, or add its directory to PATH")
    return Path(path).absolute()


def size_options(sizes: Sequence[int]) -> list[str]:
    """Return the options for sizes, which one factor has to separate.

    >>> size_options((1024, 4096, 16384))
    ['-b', '1024', '-e', '16384', '-f', '4']

    Raises InputError: sizes at uneven distances.
    """
    first, *larger = sizes
    factor = larger[0] // first if larger else 2
    if [first * factor**at for at in range(len(sizes))] != list(sizes):
        raise InputError("`sizes`", "do not grow by one whole factor", "such as 1M,4M,16M")
    return ["-b", str(first), "-e", str(sizes[-1]), "-f", str(factor)]


def read_table(text: str, *, in_place: bool = True) -> tuple[Line, ...]:
    """Read the rows of a program's output; lines of other form are no rows."""
    lines = []
    for line in text.splitlines():
        if match := _ROW.fullmatch(line):
            fields = match["rest"].split()
            groups = [fields[at : at + _FIELDS] for at in range(0, len(fields), _FIELDS)]
            groups = groups if in_place else groups[:1]
            times = [time for group in groups if (time := _number(group[0])) > 0]
            wrong = [int(group[-1]) for group in groups if group[-1].isdecimal()]
            seconds = (sum(times) / len(times) / 1e6,) if times else ()
            row = Line(int(match["size"]), match["dtype"], seconds, sum(wrong) if wrong else None)
            lines.append(row)
    return tuple(lines)


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,6})?(e\+?[0-9]{1,2})?", text) else 0


def main() -> None:
    """Run the program as rank 0, and write the results of all ranks."""
    spec, rank, folder = read_spec(JobSpec)
    if rank == 0:
        for result in _results(spec, folder):
            write_result(folder, result.rank, result)


def _results(spec: JobSpec, folder: Path) -> list[JobResult]:
    text, timed, compared = "", tuple[Line, ...](), tuple[Line, ...]()
    name = Path(spec.nccl_tests).name
    sizes = [row.bytes for row in spec.rows if row.over_all and row.collective == PROGRAMS[name]]
    if spec.checks or not sizes:
        text, compared = _ran(spec, folder, _CHECKED, checks=spec.checks, calls=1, warm_ups=1)
    if sizes:
        text, timed = _ran(spec, folder, sizes, checks=False, calls=20, warm_ups=5)
    if len(timed) != len(sizes) or not all(row.seconds for row in timed):
        print(text)
        sys.exit(f"error: {name} printed times of {len(timed)} of {len(sizes)} sizes")
    # The program says nothing on single ranks.
    wrong = tuple(
        WrongValue(
            case=f"{PROGRAMS[name]}, {row.dtype}, {row.bytes} bytes",
            rank=0,
            what=f"{row.wrong} values are wrong",
        )
        for row in compared
        if row.wrong
    )
    checked = sum(row.wrong is not None for row in compared)
    devices = [visible(match["name"].strip()) for match in _DEVICE.finditer(text)]
    shared = JobResult(
        rank=0,
        torch=f"{NO_TORCH}, but {name}",
        nccl=parse_log(nccl_log(folder), where="NCCL's log").version or "",
        # Smaller communicators, which come last, are not timed.
        times=tuple(
            batches(row, line.seconds if line else ())
            for row, line in zip_longest(spec.rows, timed)
        ),
    )
    first, *further = (
        replace(shared, rank=rank, device=device)
        for rank, device in zip_longest(range(spec.world), devices[: spec.world], fillvalue="")
    )
    return [replace(first, checked=checked, wrong=wrong), *further]


def _ran(
    spec: JobSpec, folder: Path, sizes: Sequence[int], *, checks: bool, calls: int, warm_ups: int
) -> tuple[str, tuple[Line, ...]]:
    """Run the program once, with a log of its own; return its output, and the table's rows."""
    counts = {"-g": spec.world, "-c": int(checks), "-n": calls, "-w": warm_ups}
    options = [text for option, number in counts.items() for text in (option, str(number))]
    for log in folder.glob(LOGS):
        log.unlink()
    done = subprocess.run(
        [spec.nccl_tests, *size_options(sizes), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    text = done.stdout[:_MAX_OUTPUT].decode(errors="replace")
    if done.returncode:
        print(text)
        sys.exit(max(1, done.returncode))
    facts = COLLECTIVES[PROGRAMS[Path(spec.nccl_tests).name]]
    return text, read_table(text, in_place=facts.in_place)


if __name__ == "__main__":
    main()
