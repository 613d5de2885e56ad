"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tccl_py.errors import InputError
from tccl_py.model.machine import Machine, parse_gpus

MACHINE_HELP = (
    "A bundled name (see `tccl machines`), a JSON file this program wrote, or an NCCL topology XML."
)


def opt(metavar: str, text: str, *names: str, panel: str | None = None) -> Any:
    """Return an option with a value."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel)


ADVANCED = "Advanced"
advanced = partial(opt, panel=ADVANCED)
"""The same for options that few users need."""


def flag(name: str, text: str, panel: str | None = None) -> Any:
    """Return an option without a value."""
    return opt(" ", text, name, panel=panel)


Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A plan's directory.")]
PlanPath = Annotated[
    Path, typer.Argument(metavar="DIR", help="A plan's directory, or its plan.json.")
]
Json = Annotated[bool, flag("--json", "Print JSON, not text.")]
DryRun = Annotated[bool, flag("--dry-run", "Say what would change, and change nothing.")]
Output = Annotated[
    Path | None, opt("FILE", "Write to FILE, whole or not at all.", "-o", "--output")
]
Simulate = Annotated[
    str | None, opt("MACHINE", f"Take rates from a model, not from hardware. {MACHINE_HELP}")
]
BACKEND_HELP = "GPUs (the default), or processes in host memory in their place: a dry run."
Backend = Annotated[str | None, opt("cuda|host", BACKEND_HELP)]
Devices = Annotated[
    int | None, advanced("N", "Devices of the host backend; if not given one a core, 2 to 8.")
]
Target = Annotated[
    float | None,
    advanced(
        "F",
        "Repeat a set until the 95 % interval of every flow's rate is narrower than this share of "
        "it, at most 30 times (a plan's search 10); 0.01 by default.",
    ),
]
Interfaces = Annotated[
    str | None,
    advanced(
        "LIST", "Network interfaces that are NICs N0, N1 ..., as eth0,eth1; all if not given."
    ),
]
Network = Annotated[
    str | None,
    advanced(
        "tcp|nccl", "Between hosts: NCCL, or TCP between host memories, as the host backend does."
    ),
]
Noise = Annotated[float | None, advanced("F", "Spread of simulated samples, 0 to 1.")]
Seed = Annotated[int | None, advanced("N", "Seed of the noise.")]
Gpus = Annotated[str | None, opt("LIST", "GPUs, as 0,2,5 or 0-3; all if not given.")]

_OF_MODEL = ("noise", "seed")
_OF_HARDWARE = ("backend", "devices", "target", "meeting", "check")
_OF_JOB = ("interfaces", "network")
_WITH_MODEL = ("beside --simulate", "is about hardware", "leave one of the two out")
_WITHOUT_MODEL = ("without --simulate", "is about models", "add --simulate MACHINE")
_OUTSIDE_JOB = ("", "is about the hosts of an MPI job", "start the command by mpirun or srun")
OF_CLUSTER = ("", "is for the plan of a machine, this one is of a cluster", "leave it out")


def refuse(options: Mapping[str, object], why: tuple[str, str, str]) -> None:
    """Refuse given options (not None or False) for: a contradicting option, reason, remedy."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise InputError(f"{name} {why[0]}".rstrip(), *why[1:])


def check_source(given: Mapping[str, object], *, in_job: bool) -> None:
    """Refuse options, given by their names, that are of another source than is asked for."""
    simulated = given["simulate"] is not None
    for names, of_this, why in (
        (_OF_MODEL, simulated, _WITHOUT_MODEL),
        ((*_OF_HARDWARE, *_OF_JOB), not simulated, _WITH_MODEL),
        (_OF_JOB, in_job, _OUTSIDE_JOB),
    ):
        if not of_this:
            refuse({f"--{name}": given.get(name) for name in names}, why)


def in_range(name: str, value: float, most: float, *, least: float = 1) -> None:
    """Check that an option's number is in `least` to `most` (a `least` of 0 is excluded)."""
    # The comparison is written so that NaN fails it.
    if not (value > 0 if least == 0 else least <= value) or not value <= most:
        right = f"above 0, at most {most:.12g}" if least == 0 else f"{least:.12g} to {most:.12g}"
        raise InputError(name, f"is {value:.12g}", right)


def one_of(name: str, value: str, known: Collection[str]) -> None:
    """Check that an option has one of the known values."""
    if value not in known:
        where = f"{name} {value[:20]!r}"
        raise InputError(where, "is not known", f"one of {', '.join(known)}")


def gpus_argument(text: str | None, machine: Machine) -> tuple[int, ...] | None:
    """Parse a list of a machine's GPUs, in the order given; None stays None."""
    if text is None:
        return None
    indices = parse_gpus(text)
    for index in indices:
        machine.gpu(index)
    return indices


def check_quoted(sets: Iterable[str], example: str) -> None:
    """Refuse a set that the shell has cut: `->` without quotes writes to a file."""
    for text in sets:
        if text.endswith("-"):
            raise InputError(
                f"set {text[:40]!r}",
                "ends with -, as where the shell takes > for a file to write to",
                f"put each set in quotes, as '{example}', or write 0:1, which needs none",
            )
