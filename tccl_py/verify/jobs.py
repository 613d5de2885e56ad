"""Jobs of real collectives: one fresh process per rank, here or over hosts; or by nccl-tests.

A program of nccl-tests, as all_reduce_perf, serves hosts without torch: one process drives all GPUs
(`-g N`). A size's time is the mean of the program's times out of place and, except all-to-all, in
place. Source of the options and of the table: README of NVIDIA/nccl-tests.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError, TcclError, visible
from tccl_py.files import decode_json, encode_json, temporary_folder
from tccl_py.nccl.communicators import parse_log
from tccl_py.nccl.settings import HOST_VARIABLES, Settings
from tccl_py.plan.directory import GRAPH_FILE
from tccl_py.plan.plan import ChoiceName
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.rank import JobSlot, Rendezvous
from tccl_py.rank_processes.tasks import (
    FOLDER,
    TORCH,
    TRAINING,
    RankOutput,
    RanksError,
    Task,
    decoded,
    nccl_log,
    run_tasks,
    torch_environment,
)
from tccl_py.verify.spec import KIB, Backend, Collective, JobResult, JobSpec, WrongValue

RANK_PROGRAM = "tccl_py.verify.rank"
DEFAULT_TIMEOUT = 180.0
THIS_HOST = ""
"""Name of the host of a job on one machine."""
GRAPH_VARIABLE = "NCCL_GRAPH_FILE"
_RANK_VARIABLES = {
    "NCCL_CONF_FILE": "/dev/null",
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P,SHM,NET",
}
_CONCURRENT = 4
_CONCURRENT_BYTES = 4 << 30
"""Limit of the buffers of concurrent jobs on a device, which may have few GiB."""

Say = Callable[[str], None]
"""Receives a line for the user."""


class JobError(TcclError):
    """A job failed; names the rank and its last output."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """An A/B arm: a choice of the plan and its NCCL variables.

    `graphs` are the texts of graph files by host: each host's ranks get their own, whatever path
    NCCL_GRAPH_FILE of `variables` names. `predicted_gbps` is None where the plan has no rate.
    """

    name: ChoiceName
    variables: dict[str, str]
    settings: Settings
    predicted_gbps: float | None = None
    graphs: dict[str, str] = {}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a job's ranks, in order, and NCCL's log."""

    results: tuple[JobResult, ...]
    log: str

    @property
    def wrong(self) -> tuple[WrongValue, ...]:
        """Return the wrong values of all ranks."""
        return tuple(value for rank in self.results for value in rank.wrong)


class Runner(Protocol):
    """Starts ranks on hosts by name."""

    def rendezvous(self, host: str, count: int) -> Sequence[Rendezvous | None]:  # noqa: ARG002
        """Open the rendezvous of the next jobs at the first ranks' host; ranks of one need none."""
        return [None] * count

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> Mapping[str, Sequence[RankOutput]]:
        """Run each host's ranks, of one job or of several at once."""


@dataclass(frozen=True)
class LocalRunner(Runner):
    """Runs ranks on this host."""

    server: ForkServer | None = None

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> Mapping[str, Sequence[RankOutput]]:
        """Run the ranks; see `Runner`."""
        ((host, own),) = tasks.items()
        return {host: run_tasks(own, server=self.server)}


class HostRanks(msgspec.Struct, frozen=True, kw_only=True):
    """A host of a job: its ranks, their GPUs in order, and the caller's environment there."""

    name: str = THIS_HOST
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]
    environment: dict[str, str]


class Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """Runs jobs on its hosts, rank 0's first, `most_at_once` at the same time.

    `keep` are caller's variables that jobs get. `say` receives notices for the user, `watch` a line
    on the current work.
    """

    backend: Backend
    hosts: tuple[HostRanks, ...]
    runner: Runner = LocalRunner()
    most_at_once: int = _CONCURRENT
    keep: tuple[str, ...] = ()
    timeout: float = DEFAULT_TIMEOUT
    program: str = RANK_PROGRAM
    say: Say = lambda _: None
    watch: Say = lambda _: None

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return sum(len(host.ranks) for host in self.hosts)

    def over(self, gpus: tuple[int, ...]) -> Launcher:
        """Return a launcher over these GPUs of a single host."""
        host = replace(self.hosts[0], ranks=tuple(range(len(gpus))), gpus=gpus)
        return replace(self, hosts=(host,))

    def run(self, arms: Sequence[Arm], spec: JobSpec) -> tuple[Outcome, ...]:
        """Run a job of each arm, all at once, with their timed batches interleaved."""
        meetings = self.runner.rendezvous(self.hosts[0].name, len(arms))
        tasks = {}
        for host in self.hosts:
            slot = partial(JobSlot, jobs=len(arms), ranks=len(host.ranks))
            tasks[host.name] = tuple(
                self._task(host, arm, replace(spec, rendezvous=meeting, slot=slot(number=number)))
                for number, (arm, meeting) in enumerate(zip(arms, meetings, strict=True))
            )
        try:
            outputs = self.runner.run(tasks)
        except MeasurementError as error:
            raise JobError(str(error)) from error
        found = []
        for number in range(len(arms)):
            parts = [(host.ranks, outputs[host.name][number]) for host in self.hosts]
            results = [decoded(output, ranks, JobResult) for ranks, output in parts]
            log = "\n".join(output.log for _, output in parts)
            found.append(Outcome(results=tuple(chain(*results)), log=log))
        return tuple(found)

    def variables(self, arm: Arm) -> dict[str, str]:
        """Return all NCCL variables of an arm's jobs."""
        caller, names = self.hosts[0].environment, sorted({*HOST_VARIABLES, *self.keep})
        return {name: caller[name] for name in names if name in caller} | arm.variables

    def _task(self, host: HostRanks, arm: Arm, spec: JobSpec) -> Task:
        variables, files = dict(arm.variables), {}
        if GRAPH_VARIABLE in variables:
            variables[GRAPH_VARIABLE] = f"{FOLDER}/{GRAPH_FILE}"
            files[GRAPH_FILE] = arm.graphs[host.name]
        gpus = host.gpus if self.backend == "cuda" else None
        environment = rank_environment(host.environment, gpus, variables, self.keep)
        own = replace(spec, backend=self.backend, world=self.world, first_rank=host.ranks[0])
        return Task(
            program=self.program,
            spec=encode_json(own),
            ranks=host.ranks,
            environment={**environment, "NCCL_DEBUG_FILE": f"{FOLDER}/log-%p"},
            timeout=self.timeout,
            files=files,
            imports=TRAINING if spec.training else TORCH,
        )


class ConcurrentJobs:
    """Runs jobs of arms, `at_once` at the same time.

    The number follows from the room for buffers of `sizes` on a device. It drops to 1 when several
    jobs fail together, because each may be able to run alone.
    """

    def __init__(self, launcher: Launcher, sizes: Sequence[int]) -> None:
        self._launcher = launcher
        most = max(len(host.ranks) for host in launcher.hosts)
        largest = max(sizes, default=1) * (most if launcher.backend == "host" else 1)
        self.at_once = max(1, min(launcher.most_at_once, _CONCURRENT_BYTES // largest))

    def run(self, arms: Sequence[Arm], spec: JobSpec) -> list[Outcome | JobError]:
        """Return each arm's outcome, or the error of a job that fails alone."""
        found: list[Outcome | JobError] = []
        while len(found) < len(arms):
            batch = arms[len(found) :][: self.at_once]
            try:
                found += self._launcher.run(batch, spec)
            except JobError as error:
                found += [error] * (self.at_once == 1)
                self.at_once = 1
        return found


def rank_environment(
    caller: Mapping[str, str],
    gpus: Sequence[int] | None,
    variables: Mapping[str, str],
    keep: Iterable[str] = (),
) -> dict[str, str]:
    """Return the environment of ranks over these GPUs (None: in host memory) with `variables`.

    Of the caller's NCCL variables, HOST_VARIABLES and `keep` stay unless `variables` sets them. The
    user's own nccl.conf is not read; /etc/nccl.conf is.
    """
    kept = {*HOST_VARIABLES, *keep}
    own = {
        name: value
        for name, value in caller.items()
        if name in kept or not name.startswith(("NCCL_", "TORCH_NCCL_"))
    }
    # CUDA graphs stand for single calls, for which NCCL registers no buffers.
    nccl = {} if gpus is None else _RANK_VARIABLES
    return {**torch_environment(own, gpus), **nccl, **variables}


# Programs of nccl-tests.


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


def find_program(name: str) -> Path:
    """Return the path of a program of nccl-tests. Raises InputError: another one, or none there."""
    where = f"--with {name[:80]!r}"
    if Path(name).name not in PROGRAMS:
        raise InputError(where, "is no program of nccl-tests", f"one of {', '.join(PROGRAMS)}")
    found = shutil.which(name)
    if found is None:
        raise InputError(where, "is not there", "name its path, or add its directory to PATH")
    return Path(found).absolute()


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


@dataclass(frozen=True)
class NcclTests(Runner):
    """Runs a host's jobs one after another by a program of nccl-tests."""

    program: Path

    def run(self, tasks: Mapping[str, Sequence[Task]]) -> Mapping[str, Sequence[RankOutput]]:
        """Run the jobs; see `Runner`."""
        ((host, own),) = tasks.items()
        return {host: [self._output(task) for task in own]}

    def _output(self, task: Task) -> RankOutput:
        spec = decode_json(task.spec, JobSpec, where="specification")
        timed: tuple[Timed, ...] = ()
        compared: tuple[Timed, ...] = ()
        text = log = ""
        if spec.checks or not spec.sizes:
            checks = ("-c", str(int(spec.checks)), "-n", "1", "-w", "1")
            text, log, compared = self._ran(task, _CHECKED, *checks)
        if spec.sizes:
            text, log, timed = self._ran(task, spec.sizes, "-c", "0", "-n", "20", "-w", "5")
        if len(timed) != len(spec.sizes) or not all(row.seconds for row in timed):
            name = self.program.name
            what = f"{name} printed times of {len(timed)} of {len(spec.sizes)} sizes"
            raise RanksError(task.ranks, what, text.strip()[-_TAIL:])
        devices = [visible(match["name"].strip()) for match in _DEVICE.finditer(text)]
        shared = JobResult(
            rank=0,
            torch=f"{NO_TORCH}, but {self.program.name}",
            nccl=parse_log(log, where="NCCL's log").version or "",
            # Smaller communicators are not timed.
            timings=(*(row.seconds for row in timed), *[()] * (len(spec.rows) - len(timed))),
        )
        first, *others = (
            replace(shared, rank=rank, device=device)
            for rank, device in zip_longest(task.ranks, devices[: len(task.ranks)], fillvalue="")
        )
        # The program says nothing on single ranks.
        checked = sum(row.wrong is not None for row in compared)
        wrong = tuple(self._wrong(row, first.rank) for row in compared if row.wrong)
        results = [replace(first, checked=checked, wrong=wrong), *others]
        return RankOutput(results=tuple(map(encode_json, results)), log=log)

    def _wrong(self, row: Timed, rank: int) -> WrongValue:
        case = f"{PROGRAMS[self.program.name]}, {row.dtype}, {row.bytes} bytes"
        return WrongValue(case=case, rank=rank, what=f"{row.wrong} values are wrong")

    def _ran(
        self, task: Task, sizes: Sequence[int], *options: str
    ) -> tuple[str, str, tuple[Timed, ...]]:
        """Run the program once; return its output, NCCL's log, and the table's rows."""
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
            in_place = PROGRAMS[self.program.name] != "all_to_all"
            return text, nccl_log(folder), read_table(text, in_place=in_place)
