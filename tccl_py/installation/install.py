"""Installation of a plan's settings into files, and its removal, with a record of the files.

The files are nccl.conf, a SLURM task prolog, and an environment module. None names a graph file,
because they hold for all communicators of a job and a graph file for communicators over exactly its
GPUs. They load NCCL's plugin, which gives each communicator its own, and set the variables that it
needs, or set the plan's settings; prolog and module also set TCCL_PLAN, for tccl_py.torch. The
record is in the user's state directory (XDG_STATE_HOME, else .local/state in the home of the
password database, whatever HOME says).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tccl_py.delivery.fit import ALIKE_VARIABLE
from tccl_py.delivery.job import JobRequest, Say, deliver_to_host, why_elsewhere
from tccl_py.delivery.plugin import PLUGIN_VARIABLE, check_trusted
from tccl_py.errors import InputError
from tccl_py.experiments.record import why_not_verified
from tccl_py.files import (
    check_path,
    check_version,
    decode_json,
    encode_json,
    lock,
    read_text,
    refused,
    sweep_beside,
    write_atomically,
)
from tccl_py.installation.blocks import (
    HEADS,
    Change,
    Kind,
    apply_changes,
    has_block,
    read_own,
    real_path,
    with_block,
    without_block,
)
from tccl_py.model.machine import Fingerprint
from tccl_py.nccl.settings import Settings, env_conflicts, job_environment
from tccl_py.nccl_library import conf_lines, passwd_home, user_file
from tccl_py.plan.beside import plan_in, planned_fingerprint
from tccl_py.plan.directory import conf_text
from tccl_py.plan.staging import PLAN_FILE, check_files

PLAN_VARIABLE = "TCCL_PLAN"
_PLAIN = "_-./+@%:,="
FORMAT_VERSION = 2
RECORD_FILE = "installed.json"
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh", "busybox")
_GRAPH = "NCCL_GRAPH_FILE"


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """A plan to install: its directory and settings, and the machine that it holds for.

    `gpu_uuids` are the plan's GPUs, none if it holds for all hosts that are `alike`. `fingerprint`
    is None for a plan without a measured machine, which holds wherever it is installed. `plugin`
    are the variables of jobs with NCCL's plugin, in place of the settings. `of_cluster` plans are
    for jobs over several hosts.
    """

    directory: Path
    settings: Settings
    provenance: str
    fingerprint: Fingerprint | None = None
    gpu_uuids: tuple[str, ...] = ()
    alike: bool = False
    plugin: Mapping[str, str] = {}
    of_cluster: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables of jobs with the plugin, or else a job's settings."""
        return dict(self.plugin) or job_environment(self.settings)

    @property
    def environment(self) -> dict[str, str]:
        """Return `variables`, and those by which tccl_py.torch finds the plan."""
        more = {ALIKE_VARIABLE: "1"} if self.alike else {}
        return {**self.variables, PLAN_VARIABLE: str(self.directory), **more}


def plan_to_install(
    directory: Path, *, alike: bool, plugin: bool, force: bool, newer_nccl: bool = False, say: Say
) -> Installed:
    """Return the plan in a directory as it is installed; `say` gets notices.

    Without `force` the plan must be verified, and of this machine. With `plugin` the plugin is
    loaded where NCCL has plugins, with `newer_nccl` also where it is later than those tried.

    Raises InputError: no plan, changed files, or not to be trusted.
    """
    plan = plan_in(directory)
    check_files(directory)
    place = directory.resolve()
    check_path(place)
    check_trusted(place / PLAN_FILE)
    why = "is simulated" if plan.simulated else why_not_verified(directory)
    why = "is a DRY RUN, which says nothing about GPUs" if plan.dry_run else why
    if not why and not plan.is_cluster:
        elsewhere = why_elsewhere(plan, directory, alike=alike, say=say)
        why = f"was measured on another machine: {elsewhere}" if elsewhere else ""
    if why and not force:
        raise InputError(str(directory), why, "measure and `tccl verify` it first, or add `force`")
    if why:
        say(f"{directory} {why}: accepted because of `force`")
    request = JobRequest(plugin=plugin, alike=alike, newer_nccl=newer_nccl)
    variables = deliver_to_host(plan, directory, request, say=say).variables
    loading = variables if PLUGIN_VARIABLE in variables else {}
    of_host = not plan.is_cluster and not plan.simulated
    fingerprint = planned_fingerprint(plan, directory) if of_host else None
    uuids = {} if fingerprint is None or alike else fingerprint.uuids(plan.machine)
    return Installed(
        directory=place,
        settings=plan.plain_settings,
        provenance=plan.provenance,
        plugin=loading,
        of_cluster=plan.is_cluster,
        alike=alike,
        fingerprint=fingerprint,
        gpu_uuids=tuple(uuids[gpu] for gpu in plan.class_gpus[0] if gpu in uuids),
    )


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of all files with our block."""

    files: tuple[str, ...]
    format_version: int = FORMAT_VERSION


def install(plan: Installed, targets: Mapping[Kind, Path], *, dry_run: bool) -> tuple[Change, ...]:
    """Put a plan into these files, one of each kind, beside their other content.

    Files need not exist, directories do; with `dry_run`, only return the changes. Raises
    InputError, with no file changed: a file may not or cannot change, has damaged markers, or has
    other lines that contradict the plan.
    """
    changes = tuple(_change(plan, kind, path) for kind, path in targets.items())
    paths = {str(change.path) for change in changes}
    if len(paths) != len(changes):
        where = str(changes[0].path)
        raise InputError(where, "is named for two things", "name a file for each")
    if dry_run:
        return changes
    directory = state_directory()
    with _opened_record(directory) as recorded:
        for change in changes:
            sweep_beside(change.path)
        # The record first: an entry without a block does no harm, a block without an entry stays.
        _save_record([*recorded, *sorted(paths.difference(recorded))], directory)
        try:
            apply_changes(changes)
        except BaseException:
            _save_record(recorded, directory)
            raise
    return changes


def uninstall(paths: Sequence[Path] = (), *, dry_run: bool = False) -> tuple[Change, ...]:
    """Remove our block from all recorded files and NCCL's user file, or from these.

    With `dry_run`, change nothing. Files without a block have a change that is not `needed`.
    """
    directory = state_directory()
    if dry_run:
        return _removal(paths, load_record(directory))
    with _opened_record(directory) as recorded:
        removal = _removal(paths, recorded)
        for change in removal:
            sweep_beside(change.path)
        apply_changes(removal)
        removed = {str(change.path) for change in removal}
        _save_record([path for path in recorded if path not in removed], directory)
    return removal


def _removal(paths: Sequence[Path], recorded: Sequence[str]) -> tuple[Change, ...]:
    changes = []
    # The record of another XDG_STATE_HOME may have the user's file.
    default = [path for path in [user_file()] if has_block(path)]
    for path in dict.fromkeys(map(real_path, paths or [*map(Path, recorded), *default])):
        before = read_own(path) if path.exists() else None
        after = None if before is None else without_block(before, where=str(path))
        changes.append(Change(path=path, before=before, after=after))
    return tuple(changes)


def _change(plan: Installed, kind: Kind, path: Path) -> Change:
    place, where = real_path(path), str(path)
    before = read_own(place)
    check_trusted(place.parent)
    if kind == "module" and path.suffix == ".lua":
        raise InputError(where, "is for Lua", "name a Tcl module, which Lmod reads as well")
    others = None if before is None else without_block(before, where=where)
    if others is not None:
        _check_others(plan, kind, others, where)
    after = with_block(before, body_of(plan, kind), head=HEADS[kind], where=where)
    mode = 0o755 if kind == "slurm-prolog" else 0o644
    return Change(path=place, before=before, after=after, mode=mode)


def _check_others(plan: Installed, kind: Kind, others: bytes, where: str) -> None:
    if kind == "conf":
        _check_conf(plan, others, where)
    elif kind == "slurm-prolog":
        first = others.partition(b"\n")[0].decode("utf-8", "replace")
        words = first.removeprefix("#!").replace("/", " ").split()
        if first.startswith("#!") and not set(words) & set(_SHELLS):
            raise InputError(where, f"is for {first[2:40].strip()}", "name a shell's script")
    elif others and not others.startswith(b"#%Module"):
        raise InputError(where, "is no module file", "its first line begins with #%Module")


def _check_conf(plan: Installed, others: bytes, where: str) -> None:
    lines = {line.name: line for line in reversed(conf_lines(others, where=where))}
    if _GRAPH in lines:
        right = "take it out: it fails every communicator over other GPUs"
        raise InputError(lines[_GRAPH].where, f"sets {_GRAPH}", right)
    values = {name: line.value for name, line in lines.items()}
    names = [name for name in env_conflicts(plan.settings, values) if name in lines]
    names += [name for name, value in plan.variables.items() if values.get(name, value) != value]
    if names:
        fault = f"sets {names[0]}={values[names[0]][:60]}, against the plan's settings"
        raise InputError(lines[names[0]].where, fault, "take it out, or plan again with it")


def state_directory() -> Path:
    """Return the directory of the record, which no change of HOME moves."""
    named = os.environ.get("XDG_STATE_HOME", "")
    base = Path(named) if named.startswith("/") else passwd_home() / ".local" / "state"
    return base / "tccl"


def load_record(directory: Path) -> tuple[str, ...]:
    """Return the recorded paths, none without a record."""
    path = directory / RECORD_FILE
    if not path.exists():
        return ()
    record = decode_json(read_text(path), Record, where=str(path))
    check_version(record.format_version, FORMAT_VERSION, path)
    return record.files


@contextmanager
def _opened_record(directory: Path) -> Iterator[tuple[str, ...]]:
    """Lock the record until the block ends; its directory goes if nothing is recorded then.

    Raises InputError: another run holds the record, or the record is unreadable.
    """
    with refused(directory, "cannot be made", "name a writable place by XDG_STATE_HOME"):
        directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(descriptor, directory)
        sweep_beside(directory / RECORD_FILE)
        yield load_record(directory)
    finally:
        # Refused where a record is left.
        with suppress(OSError):
            directory.rmdir()
        os.close(descriptor)


def _save_record(files: Sequence[str], directory: Path) -> None:
    """Write the record; without files, remove it."""
    if files:
        write_atomically(directory / RECORD_FILE, encode_json(Record(files=tuple(files))))
        return
    with refused(directory, "cannot be written", "make it writable"):
        (directory / RECORD_FILE).unlink(missing_ok=True)


def body_of(plan: Installed, kind: Kind) -> str:
    """Return our lines for a file of this kind; modules are Tcl, which Lmod reads as well."""
    if kind == "slurm-prolog":
        return _prolog(plan)
    if kind == "module":
        lines = [f"setenv {name} {_tcl_word(value)}\n" for name, value in plan.environment.items()]
        return f"# tccl-py, rates {plan.provenance}.\n{''.join(lines)}"
    if not plan.plugin:
        return conf_text(plan.settings, provenance=plan.provenance)
    head = f"# tccl-py, rates {plan.provenance}; `tccl show --sets` says for whom.\n"
    return head + "".join(f"{name}={value}\n" for name, value in plan.plugin.items())


def _prolog(plan: Installed) -> str:
    """Return lines for a TaskProlog, whose output SLURM adds to the task's environment.

    Variables that the job sets stay. The prolog runs before every task, so it needs no Python and
    never fails, because SLURM would end the task.
    """
    exports = "".join(
        f'    [ -n "${{{name}+x}}" ] || printf "%s\\n" {shlex.quote(f"export {name}={value}")}\n'
        for name, value in plan.environment.items()
    )
    return (
        f"# tccl-py, rates {plan.provenance}; for TaskProlog= in slurm.conf, or srun --task-prolog."
        f"\n(\n{_guard(plan)}{exports}) || :\n"
    )


def _guard(plan: Installed) -> str:
    """Return shell lines that exit on machines other than the plan's, and in larger jobs."""
    measured, one_node = plan.fingerprint, ""
    if not plan.of_cluster:  # Ranks on other hosts may be without the plan: unlike variables hang.
        one_node = '    [ "${SLURM_JOB_NUM_NODES:-1}" -eq 1 ] || exit 0\n'
    if measured is None:
        return one_node
    uuids = "".join(
        f'    grep -qsF -- {shlex.quote(uuid)} "$gpus"/*/information || exit 0\n'
        for uuid in plan.gpu_uuids
    )
    major = measured.driver.partition(".")[0]
    pattern = shlex.quote(f"[[:space:]]{major}[.][0-9]")
    return (
        f"{one_node}"
        "    # Only with the GPUs, driver and NUMA nodes that the plan was measured on.\n"
        f"    gpus=/proc/driver/nvidia/gpus\n{uuids}"
        f"    grep -qs {pattern} /proc/driver/nvidia/version || exit 0\n"
        "    nodes=0\n"
        "    for list in /sys/devices/system/node/node[0-9]*/cpulist; do\n"
        '        ! grep -qs "[0-9]" "$list" || nodes=$((nodes + 1))\n'
        "    done\n"
        f'    [ "$nodes" -eq {measured.numa_count} ] || exit 0\n'
    )


def _tcl_word(text: str) -> str:
    r"""Return a Tcl word for any text.

    >>> _tcl_word("/a b/$x")
    '/a\\ b/\\$x'
    """
    return "".join(char if char.isalnum() or char in _PLAIN else f"\\{char}" for char in text)
