"""The run of a job with NCCL's log of calls: variables, the job's process, and what it costs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType

from tccl_py.errors import require, spell
from tccl_py.files import SPACE, explain_errors
from tccl_py.launchers import in_job

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SUBSYSTEMS = ("INIT", "COLL")
_PROBED = 2000
"""Lines that are written to time one."""


def is_one_rank(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher started this process as one of several ranks."""
    # torchrun's variables; those of MPI's launchers come first.
    return in_job(environment) or (
        "RANK" in environment and environment.get("WORLD_SIZE", "1") != "1"
    )


def log_folder(output: Path, *, shared: bool) -> Path:
    """Make the folder of a recording's logs next to its file; a `shared` one may exist."""
    with explain_errors(output, "cannot be written", SPACE):
        require(not output.is_dir(), str(output), "is a directory", "name a file")
    folder = output.parent.resolve() / f"{output.name}.logs"
    with explain_errors(folder, "cannot be made", SPACE):
        folder.mkdir(exist_ok=True)
        used = not shared and any(folder.iterdir())
    right = "read it by `tccl workload`, then remove it, or name another file"
    require(not used, str(folder), "has logs of an earlier recording", right)
    return folder


def log_variables(
    folder: Path, environment: Mapping[str, str], say: Callable[[str], None]
) -> dict[str, str]:
    """Return the variables with which NCCL logs calls; `say` is told of each that they replace."""
    subsystems = environment.get("NCCL_DEBUG_SUBSYS", "")
    own = [] if subsystems.startswith("^") else subsystems.split(",")
    wanted = dict.fromkeys([*filter(None, own), *_SUBSYSTEMS])
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": ",".join(wanted),
        "NCCL_DEBUG_FILE": str(folder).replace("%", "%%") + "/%h.%p.log",
    }
    for name, value in variables.items():
        if environment.get(name, value) != value:
            say(f"for this recording {name} is {value} in the place of {environment[name]}")
    return variables


def run_job(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a job, and return its exit code as a shell has it (OSError, ValueError: no program).

    Signals to this process are passed on; Ctrl-C reaches both by the terminal.
    """
    job: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if job is None:
            early.append(number)
        else:
            job.send_signal(number)

    # Before the job starts. It inherits what is ignored, so Ctrl-C gets a handler without effect.
    handlers = {**dict.fromkeys(_FORWARDED, forward), signal.SIGINT: lambda *_: None}
    ignored = {number for number in handlers if signal.getsignal(number) == signal.SIG_IGN}
    before = {
        number: signal.signal(number, handlers[number]) for number in handlers.keys() - ignored
    }
    try:
        with subprocess.Popen(list(command), env=dict(environment)) as job:
            for number in early:
                job.send_signal(number)
            code = job.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def recorded_logs(folder: Path) -> list[Path]:
    """Return the logs in a folder (InputError without any)."""
    with explain_errors(
        folder, "cannot be read", "leave it to this command until the job has ended"
    ):
        logs = sorted(path for path in folder.iterdir() if path.suffix == ".log")
    right = "run a job whose ranks use NCCL"
    require(logs, str(folder), "has no log of NCCL", right)
    return logs


def recording_cost(logs: Sequence[Path], seconds: float) -> str:
    """Measure what the logs of a job of `seconds` cost, and return it as a clause.

    Lines as long as theirs are written to their place; each rank writes its own log.
    """
    total = sum(path.stat().st_size for path in logs)
    lines = sum(map(_lines_of, logs))
    line = b"x" * max(1, total // max(1, lines) - 1) + b"\n"
    place = logs[0].parent
    with (
        explain_errors(place, "cannot be written", SPACE),
        TemporaryFile(dir=place, buffering=0) as file,
    ):
        begun = time.perf_counter()
        for _ in range(_PROBED):
            file.write(line)
        each = (time.perf_counter() - begun) / _PROBED
    share = lines / len(logs) * each / max(seconds, 1e-9)
    return (
        f"NCCL logged {spell(lines, 'line')} ({total / 1e6:.1f} MB) in "
        f"{spell(len(logs), 'file')}; a line takes {each * 1e6:.1f} us here, measured by writing "
        f"as many bytes: {share:.2%} of the job's {seconds:.1f} s"
    )


def _lines_of(path: Path) -> int:
    with path.open("rb") as handle:
        return sum(block.count(b"\n") for block in iter(lambda: handle.read(1 << 20), b""))
