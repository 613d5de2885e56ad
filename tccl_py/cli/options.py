"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import typer

from tccl_py.errors import InputError

if TYPE_CHECKING:
    from tccl_py.model.machine import Machine

Command = TypeVar("Command", bound=Callable[..., None])
_SIZE = re.compile(r"([0-9]{1,12}) ?([kmg]?)(?:i?b)?", re.ASCII)
_LEAST_BYTES, _MAX_BYTES, _MAX_SIZES = 4, 16 << 30, 32

MACHINE_HELP = (
    "A bundled name (see `tccl discover`), a JSON file this program wrote, an NCCL topology XML, "
    "or the text of `nvidia-smi topo -m`."
)


def choices_of(metavar: str) -> tuple[str, ...]:
    """Return the values that an option has by its metavar, as a|b; () for any other."""
    return tuple(metavar.split("|")) if "|" in metavar and metavar.islower() else ()


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
    if "MACHINE" not in metavar and not choices_of(metavar):
        return None

    def words(incomplete: str) -> list[str]:
        from tccl_py.simulator.descriptions import bundled_names  # noqa: PLC0415 (slow)

        values = bundled_names() if "MACHINE" in metavar else choices_of(metavar)
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


class Rule(NamedTuple):
    """What holds between options of some commands, by their names."""

    commands: str
    options: str
    needs: str = ""
    """They are given beside one of these alone."""
    excludes: str = ""
    """They are given beside none of these."""


_HARDWARE = "--backend --devices --target --meeting --check --interfaces"
_OF_CHOICES = "--training --all --tune --workload"
RULES = (
    Rule("measure plan", "--noise --seed --p2p --cpu", needs="--simulate"),
    Rule("measure plan", _HARDWARE, excludes="--simulate"),
    Rule("measure", "SET", excludes="--all-pairs"),
    Rule("measure", "--bidirectional --via --gpus --csv", excludes="SET"),
    Rule("measure", "--meeting", needs="SET"),
    Rule("measure", "--csv", excludes="--json"),
    Rule("show", "--max-sets --max-causes", needs="--why"),
    Rule("show", "--hops --sets --sizes", excludes="--why OTHER"),
    Rule("show", "--why", excludes="OTHER"),
    Rule("report", "--output --force", excludes="--bundle"),
    Rule("check", "--json", excludes="--prometheus"),
    Rule("check", "--output", needs="--json --prometheus"),
    Rule("check", "--with", needs="--preflight"),
    Rule("doctor", "FILES", needs="--compare"),
    Rule("doctor", "--root --passive", excludes="--compare"),
    Rule("doctor", "--prove", excludes="--compare --root"),
    Rule("advise", "--p2p --cpu", needs="MACHINE|FILE"),
    Rule("discover", "--nccl-topology --nvidia-smi --p2p --output", excludes="MACHINE"),
    Rule("discover", "--nccl-topology", excludes="--nvidia-smi"),
    Rule("discover", "--p2p", needs="--nccl-topology --nvidia-smi"),
    Rule("validate", "--nodes --nccl", needs="--machine"),
    Rule("env run", "--gpus --host --choice", excludes="--plugin"),
    Rule("env run", "--choice", excludes="--workload"),
    Rule("export", "--gpus --keep-order", needs="--hosts"),
    Rule("verify", f"{_OF_CHOICES} --choice --no-checks --with", excludes="--means"),
    Rule("verify", f"{_OF_CHOICES} --backend", excludes="--with"),
    Rule("verify", "--choice", excludes="--tune"),
)


def check_given(command: str, given: Collection[str]) -> None:
    """Refuse options of a command that contradict each other, or are without what they are for."""
    for rule in RULES:
        options = rule.options.split() if command in rule.commands.split() else ()
        others = (rule.needs or rule.excludes).split()
        beside = [other for other in others if other in given]
        for name in filter(given.__contains__, options):
            if rule.needs and not beside:
                words = " or ".join(others)
                right = "add one of them" if others[1:] else "add it"
                raise InputError(name, f"needs {words}", right)
            if rule.excludes and beside:
                where = f"{name} beside {beside[0]}"
                raise InputError(where, "contradict each other", "leave one of the two out")


def refuse(options: Mapping[str, object], why: str, right: str) -> None:
    """Refuse given options (not None or False), with the reason and what would be right."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise InputError(name, why, right)


def check_job(options: Mapping[str, object], *, in_job: bool) -> None:
    """Refuse options that are about the hosts of a job where there is none."""
    if not in_job:
        right = "start the command by mpirun or srun"
        refuse(options, "is about the hosts of an MPI job", right)


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
    return None if text is None else text == "yes"


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
