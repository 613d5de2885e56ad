"""Jobs of verification by a program of nccl-tests, as all_reduce_perf, for hosts without torch.

One process drives all GPUs (`-g N`). A size's time is the mean of the program's times out of place
and, except all-to-all, in place. Source of the options and of the table: README of
NVIDIA/nccl-tests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tccl_py.errors import InputError, visible
from tccl_py.files import decode_json, encode_json, temporary_folder
from tccl_py.nccl.communicators import parse_log
from tccl_py.rank_processes.rank import Rendezvous
from tccl_py.rank_processes.tasks import FOLDER, RankOutput, RanksError, Task, nccl_log
from tccl_py.verify.spec import KIB, Collective, JobResult, JobSpec, WrongValue

PROGRAMS: dict[str, Collective] = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
    "alltoall_perf": "all_to_all",
    "sendrecv_perf": "send_recv",
}
NO_TORCH = "none"
"""How the version of torch begins in results of these programs."""
_CHECKED = tuple(KIB << shift for shift in range(0, 17, 4))
"""Sizes of the job that compares values."""
_ROW = re.compile(
    r"[ \t]+(?P<size>[0-9]{1,16})[ \t]+[0-9]{1,16}[ \t]+(?P<dtype>[a-z0-9_]{1,20})"
    r"[ \t]+\S{1,20}[ \t]+-?[0-9]{1,6}[ \t]+(?P<rest>[^#\n]{1,300})",
    re.ASCII,
)
_DEVICE = re.compile(r"#.{0,200}\bdevice +[0-9]{1,4} \[[^\]]{1,40}\] (?P<name>[^\n]{1,100})")
_FIELDS = 4
"""Time in us, two bandwidths, and the number of wrong values: out of place, then in place."""
_MAX_OUTPUT = 4 << 20
_TAIL = 400


class Timed(NamedTuple):
    """A row of the program's table: seconds of a call, and wrong values (None: not compared)."""

    bytes: int
    dtype: str
    seconds: tuple[float, ...]
    wrong: int | None


def find_program(name: str) -> tuple[Path, Collective]:
    """Return the path of a program of nccl-tests and its collective.

    Raises InputError: another program, or it is not there.
    """
    where = f"--with {name[:80]!r}"
    collective = PROGRAMS.get(Path(name).name)
    if collective is None:
        raise InputError(where, "is no program of nccl-tests", f"one of {', '.join(PROGRAMS)}")
    found = shutil.which(name)
    if found is None:
        raise InputError(where, "is not there", "name its path, or add its directory to PATH")
    return Path(found).resolve(), collective


def size_options(sizes: Sequence[int]) -> list[str]:
    """Return the options for sizes, which one factor has to separate.

    >>> size_options((1024, 4096, 16384))
    ['-b', '1024', '-e', '16384', '-f', '4']

    Raises InputError: sizes at uneven distances.
    """
    first, *rest = sizes
    factor = rest[0] // first if rest else 2
    if [first * factor**at for at in range(len(sizes))] != list(sizes):
        raise InputError("--sizes", "do not grow by one whole factor", "such as 1M,4M,16M")
    return ["-b", str(first), "-e", str(sizes[-1]), "-f", str(factor)]


def read_table(text: str, *, in_place: bool = True) -> tuple[Timed, ...]:
    """Read the rows of a program's output; lines of other form are no rows."""
    found = []
    for line in text.splitlines():
        if match := _ROW.fullmatch(line):
            fields = match["rest"].split()
            groups = [fields[at : at + _FIELDS] for at in range(0, len(fields), _FIELDS)]
            groups = groups if in_place else groups[:1]
            times = [time for group in groups if (time := _number(group[0])) > 0]
            wrong = [int(group[-1]) for group in groups if group[-1].isdecimal()]
            seconds = (sum(times) / len(times) / 1e6,) if times else ()
            row = Timed(int(match["size"]), match["dtype"], seconds, sum(wrong) if wrong else None)
            found.append(row)
    return tuple(found)


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,6})?(e\+?[0-9]{1,2})?", text) else 0


class NcclTests(NamedTuple):
    """Runs a host's jobs one after another by a program of nccl-tests; a `Runner`."""

    program: Path

    def rendezvous(self, host: str, count: int) -> Sequence[Rendezvous | None]:  # noqa: ARG002
        """Return none: one process has all GPUs."""
        return [None] * count

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> Mapping[str, Sequence[RankOutput]]:
        """Run the jobs; see `Runner`."""
        ((host, own),) = tasks.items()
        return {host: [self._output(task) for task in own]}

    def _output(self, task: Task) -> RankOutput:
        spec = decode_json(task.spec, JobSpec, where="specification")
        name = self.program.name
        in_place = PROGRAMS[name] != "all_to_all"
        timed: tuple[Timed, ...] = ()
        compared: tuple[Timed, ...] = ()
        text = log = ""
        if spec.checks or not spec.sizes:
            text, log = self._ran(task, _CHECKED, "-c", str(int(spec.checks)), "-n", "1", "-w", "1")
            compared = read_table(text, in_place=in_place)
        if spec.sizes:
            text, log = self._ran(task, spec.sizes, "-c", "0", "-n", "20", "-w", "5")
            timed = read_table(text, in_place=in_place)
        if len(timed) != len(spec.sizes) or not all(row.seconds for row in timed):
            what = f"{name} printed times of {len(timed)} of {len(spec.sizes)} sizes"
            raise RanksError(task.ranks, what, text.strip()[-_TAIL:])
        devices = [visible(match["name"].strip()) for match in _DEVICE.finditer(text)]
        shared = JobResult(
            rank=0,
            torch=f"{NO_TORCH}, but {name}",
            nccl=parse_log(log, where="NCCL's log").version or "",
            # Smaller communicators are not timed.
            timings=(*(row.seconds for row in timed), *[()] * (len(spec.rows) - len(timed))),
        )
        wrong = tuple(
            WrongValue(
                case=f"{PROGRAMS[name]}, {row.dtype}, {row.bytes} bytes",
                rank=task.ranks[0],
                what=f"{row.wrong} values are wrong",
            )
            for row in compared
            if row.wrong
        )
        results = [
            msgspec.structs.replace(
                shared,
                rank=rank,
                device=devices[at] if at < len(devices) else "",
                # The program says nothing on single ranks.
                checked=sum(row.wrong is not None for row in compared) if at == 0 else 0,
                wrong=wrong if at == 0 else (),
            )
            for at, rank in enumerate(task.ranks)
        ]
        return RankOutput(results=tuple(map(encode_json, results)), log=log)

    def _ran(self, task: Task, sizes: Sequence[int], *options: str) -> tuple[str, str]:
        """Run the program once; return its output and NCCL's log."""
        command = [str(self.program), *size_options(sizes), "-g", str(len(task.ranks)), *options]
        with temporary_folder("tccl-nccl-tests-") as folder:
            for name, content in task.files.items():
                (folder / name).write_text(content)
            environment = {
                name: value.replace(FOLDER, str(folder)) for name, value in task.environment.items()
            }
            output = folder / "output"
            with output.open("wb") as file:
                try:
                    done = subprocess.run(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                        stderr=subprocess.STDOUT, timeout=task.timeout, check=False,
                    )  # fmt: skip
                except (OSError, subprocess.TimeoutExpired) as error:
                    late = isinstance(error, subprocess.TimeoutExpired)
                    what = f"did not end in {task.timeout:g} s" if late else f"cannot run ({error})"
                    raise RanksError(task.ranks, what, "", late=late) from error
            with output.open("rb") as file:
                text = file.read(_MAX_OUTPUT).decode(errors="replace")
            if done.returncode:
                what = f"{self.program.name} ended with code {done.returncode}"
                raise RanksError(task.ranks, what, text.strip()[-_TAIL:])
            return text, nccl_log(folder)
