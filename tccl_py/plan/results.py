"""A plan's directory in use: the measured host and what other commands keep there.

A finding is a file beside plan.json that holds for this plan alone. One of them is tuning.json, the
tuner's tables, as `tccl verify --tune` measured them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from tccl_py.errors import InputError, require
from tccl_py.files import (
    check_version,
    decode_json,
    encode_json,
    missing,
    read_bytes,
    read_text,
    write_atomically,
)
from tccl_py.model.links import Proof
from tccl_py.model.machine import DiscoveredMachine, Fingerprint
from tccl_py.nccl.tuner import TunerTable, check_tables, tune_lines
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.directory import machine_file
from tccl_py.plan.load import is_directory, load_plan
from tccl_py.plan.machine_files import MachineFiles
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import (
    MANIFEST_FILE,
    PLAN_FILE,
    check_files,
    check_if_listed,
    read_manifest,
    write_with_plan,
)


def plan_in(directory: Path) -> Plan:
    """Read the plan in a directory.

    Raises InputError: a file, nothing there, or as `load_plan`.
    """
    if not is_directory(directory):
        fault = missing(directory, "is no directory")
        raise InputError(str(directory), fault, "name a directory of `tccl plan`")
    return load_plan(directory)


def planned_fingerprint(plan: Plan, directory: Path) -> Fingerprint | None:
    """Return the fingerprint of the host of a measured plan; None if its directory has none.

    Raises InputError: the machine's file is gone or damaged.
    """
    path = machine_file(plan, directory)
    check_if_listed(directory, str(machine_file(plan, Path())))
    try:
        host = msgspec.json.decode(read_text(path).encode(), type=DiscoveredMachine)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(str(path), "describes no machine", "plan again") from error
    return None if host.fingerprint is msgspec.UNSET else host.fingerprint


def known_fingerprint(plan: Plan, directory: Path) -> Fingerprint:
    """Return the fingerprint of the host of a measured plan.

    Raises InputError: as `planned_fingerprint`, or there is none.
    """
    fingerprint = planned_fingerprint(plan, directory)
    if fingerprint is None:
        where = str(machine_file(plan, directory))
        raise InputError(where, "does not say whose it is", "plan again")
    return fingerprint


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of findings of all versions: digest of the plan's files, and version."""

    plan_digest: str = ""
    format_version: int


def plan_digest(directory: Path) -> str:
    """Return the digest of all files of a plan; of plan.json alone where it has no manifest.

    Raises InputError: the manifest, or plan.json, cannot be read.
    """
    if (directory / MANIFEST_FILE).exists():
        return read_manifest(directory).identity
    return hashlib.blake2b(read_bytes(directory / PLAN_FILE), digest_size=8).hexdigest()


K = TypeVar("K", bound="Kept")


class Kept(_Head, frozen=True, forbid_unknown_fields=True):
    """A finding about a plan, in a file beside plan.json that holds for this plan alone.

    Another version than 1 is a default of the class.
    """

    FILE: ClassVar[str]
    format_version: int = 1

    @property
    def dry_run(self) -> bool:
        """Whether it is of host memory in the place of GPUs."""
        return False

    def fault(self) -> str:
        """Return what makes the content of a file no finding, as a clause; "" if nothing does."""
        return ""

    @classmethod
    def is_of_gpus(cls, directory: Path) -> bool:
        """Return whether a plan's directory has one, and not of a dry run."""
        with suppress(InputError):
            kept = cls.load(directory)
            return kept is not None and not kept.dry_run
        return False

    def gives_way(self, directory: Path) -> bool:
        """Return whether it is of a dry run, and a plan's directory has the same of GPUs."""
        return self.dry_run and self.is_of_gpus(directory)

    def keep(self: K, directory: Path, say: Callable[[str], None] | None = None) -> K:
        """Write the file into a plan's directory, whole or not at all; return the value.

        A dry run takes the place of nothing of GPUs. `say` is told whether it was written. Raises
        InputError: it cannot be written, and without `say` nobody would know.
        """
        path = directory / self.FILE
        if self.gives_way(directory):
            if say is not None:
                say(f"nothing was kept: {path} is of jobs on GPUs")
            return self
        finding = msgspec.structs.replace(self, plan_digest=plan_digest(directory))
        text = f"wrote {path}"
        try:
            write_atomically(path, encode_json(finding))
        except InputError as error:
            if say is None:
                raise
            text = f"nothing was kept: {error}"
        if say is not None:
            say(text)
        return finding

    @classmethod
    def load(cls: type[K], directory: Path) -> K | None:
        """Return the finding of the plan that is now in a directory; None if none, or of another.

        Raises InputError: the file is unreadable, of another version, or damaged.
        """
        path = directory / cls.FILE
        if not path.exists():
            return None
        text = read_text(path)
        head = decode_json(text, _Head, where=str(path), name=cls.__name__)
        defaults = {field.name: field.default for field in msgspec.structs.fields(cls)}
        check_version(head.format_version, defaults["format_version"], path)
        finding = decode_json(text, cls, where=str(path))
        if head.plan_digest != plan_digest(directory):
            return None
        fault = finding.fault()
        require(not fault, str(path), fault, "make it again")
        return finding


class ProvenLinks(Kept, frozen=True, kw_only=True):
    """The proof of the links of a plan's host, by which it was planned."""

    FILE = "links.json"
    proof: Proof


class Tuning(Kept, frozen=True, kw_only=True):
    """Tables measured with a choice of the plan and a version of NCCL, "" if the plugin gets none.

    `tunings` are the measured rows, as experiments write and read them.
    """

    FILE = "tuning.json"
    choice: ChoiceName
    nccl: str
    tables: tuple[TunerTable, ...] = ()
    simulated: bool = False
    tunings: msgspec.Raw = msgspec.Raw(b"[]")


def load_tuning(plan: Plan, directory: Path) -> Tuning | None:
    """Return the tables of the plan in a directory; None if none, or of an earlier plan.

    Raises InputError: tuning.json is unreadable, of another version, damaged, or does not fit.
    """
    tuning = Tuning.load(directory)
    if tuning is None or not tuning.nccl:
        return None
    check_tables(tuning.tables, plan.gpus, where=str(directory / Tuning.FILE))
    return tuning


def keep_tuning(tuning: Tuning, plan: Plan, directory: Path) -> Tuning:
    """Write tuning.json into a plan's directory, and the tables into the plugin's index.

    Each file is written whole or not at all; other findings of the plan stay. Return the content.
    The caller holds the directory (`locked`).

    Raises InputError: a table does not fit the plan, or a file of the plan was changed or cannot be
    written.
    """
    path = directory / Tuning.FILE
    check_tables(tuning.tables, plan.gpus, where=str(path))
    made_for = plan.recommended, "" if plan.simulated else _series(plan.settings.version)
    if (tuning.choice, "" if plan.simulated else _series(tuning.nccl)) != made_for:
        fault = f"was measured with the choice {tuning.choice} and NCCL {tuning.nccl}"
        right = f"the plan recommends {plan.recommended} with NCCL {plan.settings.version}"
        raise InputError(str(path), fault, right)
    held = {name: read_bytes(directory / name) for name in check_files(directory).files}
    written = tuning.keep(directory)
    texts = {
        name.removeprefix("nccl/"): content.decode()
        for name, content in held.items()
        if name.endswith(".xml")
    }
    measured = None if plan.simulated else planned_fingerprint(plan, directory)
    lines = tune_lines(tuning.tables)
    renewed = MachineFiles(plan, lines).plugin(texts, measured, directory)
    files = held | {f"nccl/{name}": content for name, content in renewed.items()}
    write_with_plan(files, directory, check=load_plan, findings=())
    return written


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])
