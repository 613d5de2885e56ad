"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from tccl_py.errors import InputError

if TYPE_CHECKING:
    from tccl_py.model.machine import Machine

Text = TypeVar("Text", bound=str)
_SIZE = re.compile(r"([0-9]{1,12}) ?([kmg]?)(?:i?b)?", re.ASCII)
_LEAST_BYTES, _MAX_BYTES, _MAX_SIZES = 4, 16 << 30, 32

MACHINE_HELP = (
    "A bundled name (see `tccl discover`), a JSON file this program wrote, an NCCL topology XML, "
    "or the text of `nvidia-smi topo -m`."
)


def arg(metavar: str, text: str, default: Any = ...) -> Any:
    """Return an argument, needed without a default, as the default of a command's parameter."""
    return typer.Argument(default, metavar=metavar, help=text, autocompletion=_words(metavar))


def opt(metavar: str, text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return an option with a value, as the default of a command's parameter."""
    completion = _words(metavar)
    return typer.Option(
        default, *names, metavar=metavar, help=text, autocompletion=completion, **more
    )


def _words(metavar: str) -> Callable[[str], list[str]] | None:
    """Return the completion of a value: of choices and names of machines; a shell has files."""
    if "MACHINE" not in metavar and not ("|" in metavar and metavar.islower()):
        return None

    def words(incomplete: str) -> list[str]:
        from tccl_py.simulator.descriptions import bundled_names  # noqa: PLC0415 (slow)

        values = bundled_names() if "MACHINE" in metavar else metavar.split("|")
        return [value for value in values if value.startswith(incomplete)]

    return words


def flag(name: str, text: str, *, default: bool | None = False, **more: Any) -> Any:
    """Return an option without a value."""
    return opt(" ", text, name, default=default, **more)


advanced = partial(opt, rich_help_panel="Advanced")
advanced_flag = partial(flag, rich_help_panel="Advanced")
"""The same for options that few users need."""

DIRECTORY = arg("DIR", "A plan's directory.")
PLAN_PATH = arg("DIR", "A plan's directory, or its plan.json.")
JSON = flag("--json", "Print JSON, not text.")
DRY_RUN = flag("--dry-run", "Say what would change, and change nothing.")
OUTPUT = opt("FILE", "Write to FILE, whole or not at all.", "-o", "--output")
SIMULATE = opt("MACHINE", f"Take rates from a model, not from hardware. {MACHINE_HELP}")
BACKEND_HELP = "GPUs (the default), or processes in host memory in their place: a dry run."
FOR_WORKLOAD = opt("FILE|NAME", "By the choice verified for this job's communication.")
WORKLOAD = opt("FILE|NAME", "Judge by a job's communication (see tccl workload).")
PROVE = advanced_flag("--prove", "Try P2P over PCIe also where ACS or an IOMMU may let it do harm.")
BACKEND = opt("cuda|host", BACKEND_HELP)
DEVICES = advanced("N", "Devices of the host backend; if not given one a core, 2 to 8.")
TARGET = advanced(
    "F",
    "Repeat a set until the 95 % interval of every flow's rate is narrower than this share of "
    "it, at most 30 times (a plan's search 10); 0.01 by default, 0.1 in a dry run.",
)
INTERFACES = advanced(
    "LIST", "Network interfaces that are NICs N0, N1 ..., as eth0,eth1; all if not given."
)
NOISE = advanced("F", "Spread of simulated samples, 0 to 1.")
SEED = advanced("N", "Seed of the noise.")
GPUS = opt("LIST", "GPUs, as 0,2,5 or 0-3; by default all visible.")

P2P = advanced(
    "yes|no", "Whether GPUs without NVLink have P2P, if MACHINE does not say (`tccl discover`)."
)
CPU = advanced("amd|intel", "The CPU's vendor, if MACHINE does not say: NCCL's P2P depends on it.")

_OF_MODEL = ("noise", "seed", "p2p", "cpu")
_OF_HARDWARE = ("backend", "devices", "target", "meeting", "check")
_OF_JOB = ("interfaces",)
_WITH_MODEL = ("beside --simulate", "is about hardware", "leave one of the two out")
_WITHOUT_MODEL = ("without --simulate", "is about models", "add --simulate MACHINE")
_OUTSIDE_JOB = ("", "is about the hosts of an MPI job", "start the command by mpirun or srun")


def refuse(options: Mapping[str, object], why: tuple[str, str, str]) -> None:
    """Refuse given options (not None or False) for: a contradicting option, reason, remedy."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise InputError(f"{name} {why[0]}".rstrip(), *why[1:])


def check_source(values: Mapping[str, object], *, in_job: bool) -> None:
    """Refuse options, given by their names, that are of another source than is asked for."""
    simulated = values["simulate"] is not None
    check_seed(values.get("seed"))
    for names, of_this, why in (
        (_OF_MODEL, simulated, _WITHOUT_MODEL),
        ((*_OF_HARDWARE, *_OF_JOB), not simulated, _WITH_MODEL),
        (_OF_JOB, in_job, _OUTSIDE_JOB),
    ):
        if not of_this:
            refuse({f"--{name}": values.get(name) for name in names}, why)


def check_seed(seed: Any) -> None:
    """Check that a seed, if given, is not negative."""
    if seed is not None and seed < 0:
        raise InputError("--seed", f"is {seed}", "0 or more")


def in_range(name: str, value: float, most: float, *, least: float = 1) -> None:
    """Check that an option's number is in `least` to `most` (a `least` of 0 is excluded)."""
    # The comparison is written so that NaN fails it.
    if not (value > 0 if least == 0 else least <= value) or not value <= most:
        right = f"above 0, at most {most:.12g}" if least == 0 else f"{least:.12g} to {most:.12g}"
        raise InputError(name, f"is {value:.12g}", right)


def one_of(name: str, value: str, values: Collection[Text]) -> Text:
    """Return that of the possible values which an option has."""
    for possible in values:
        if possible == value:
            return possible
    raise InputError(f"{name} {value[:20]!r}", "is not known", f"one of {', '.join(values)}")


def gpus_argument(text: str | None, machine: Machine) -> tuple[int, ...] | None:
    """Parse a list of a machine's GPUs, in the order given; None stays None."""
    if text is None:
        return None
    from tccl_py.model.cluster import parse_gpus  # noqa: PLC0415 (slow)

    indices = parse_gpus(text, "--gpus")
    for index in indices:
        machine.gpu(index)
    return indices


def p2p_argument(text: str | None) -> bool | None:
    """Return what --p2p says; None stays None."""
    if text is not None:
        one_of("--p2p", text, ("yes", "no"))
    return None if text is None else text == "yes"


def cpu_argument(text: str | None) -> str | None:
    """Return what --cpu says; None stays None."""
    return None if text is None else one_of("--cpu", text.lower(), ("amd", "intel"))


def check_quoted(sets: Iterable[str], example: str) -> None:
    """Refuse a set that the shell has cut: `->` without quotes writes to a file."""
    for text in sets:
        if text.endswith("-"):
            raise InputError(
                f"set {text[:40]!r}",
                "ends with -, as where the shell takes > for a file to write to",
                f"put each set in quotes, as '{example}', or write 0:1, which needs none",
            )


def parse_sizes(text: str, where: str = "sizes") -> tuple[int, ...]:
    """Parse a list of sizes in powers of 1024, in ascending order.

    >>> parse_sizes("1M, 4k,512")
    (512, 4096, 1048576)
    """
    sizes = set()
    for part in map(str.strip, text.split(",")):
        match = _SIZE.fullmatch(part.lower())
        size = int(match[1]) << 10 * " kmg".index(match[2] or " ") if match else 0
        if not _LEAST_BYTES <= size <= _MAX_BYTES:
            right = "bytes, as 4096, 4K, 1M or 1G; 4 to 16G"
            raise InputError(f"{where}: {part[:20]!r}", "is no size", right)
        sizes.add(size)
    if len(sizes) > _MAX_SIZES:
        raise InputError(where, f"has {len(sizes)} sizes", f"at most {_MAX_SIZES}")
    return tuple(sorted(sizes))
