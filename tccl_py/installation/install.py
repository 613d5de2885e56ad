"""Installation of a plan in nccl.conf, and its removal, with a record of the files.

The lines name no graph file, because they hold for all communicators of a job and a graph file for
communicators over exactly its GPUs. They load NCCL's plugin, which gives each communicator its own,
and set the variables that it needs, or set the plan's settings. The record is in the user's state
directory (XDG_STATE_HOME, else .local/state in the home of the password database, whatever HOME
says).

The plugin relies on some things that NCCL does not promise, and finds most failures at run time. A
trial with an NCCL newer than those known sees them before a job does, in NCCL's log: over a set of
GPUs that the plan gives something, over one that it does not, over the largest set, and over the
first one again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tccl_py.delivery.fit import why_elsewhere
from tccl_py.delivery.job import Delivery, JobRequest, Say, deliver_to_host, planned_or_installed
from tccl_py.delivery.plugin import PLUGIN_VARIABLE, check_trusted, plugin_exports, why_closed
from tccl_py.errors import InputError, MeasurementError, TcclError
from tccl_py.experiments.record import Verification, why_not_verified
from tccl_py.files import (
    check_path,
    check_version,
    decode_json,
    encode_json,
    explain_errors,
    lock,
    read_text,
    sweep_beside,
    write_atomically,
)
from tccl_py.health.proving import check_proof_holds
from tccl_py.installation.blocks import (
    Change,
    apply_change,
    has_block,
    read_own,
    real_path,
    with_block,
    without_block,
)
from tccl_py.nccl.asked import rank_environment, read_answer, run_questions, verdict_on
from tccl_py.nccl.communicators import CommunicatorLog, Question
from tccl_py.nccl.plugin.index import INDEX_VARIABLE, Indexed, read_index
from tccl_py.nccl.settings import GRAPH_VARIABLE, env_conflicts
from tccl_py.nccl.versions import ASSUMED, NEWER_VARIABLE, why_no_plugin
from tccl_py.nccl_conf import conf_lines, passwd_home, user_file
from tccl_py.plan.machine_files import conf_text
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import plan_in
from tccl_py.plan.staging import PLAN_FILE, check_files
from tccl_py.plan.text import why_not_default
from tccl_py.planning.installed_nccl import why_not_asked

FORMAT_VERSION = 2
RECORD_FILE = "installed.json"


def accept(
    directory: Path, request: JobRequest, *, newer_nccl: bool = False, say: Say
) -> tuple[Plan, Delivery]:
    """Return a plan that may hold for all jobs of a host, and what these get; `say` gets notices.

    Unless the request has `force` the plan must be verified, and of this machine. A choice of the
    request was verified for a workload. With `newer_nccl` the plugin is tried with a later NCCL.

    Raises InputError: no plan, changed files, not to be trusted, or links that are not as proven.
    """
    plan = plan_in(directory)
    check_files(directory)
    place = directory.resolve()
    check_path(place)
    check_trusted(place / PLAN_FILE)
    why = "" if request.choice is not None else why_not_verified(directory)
    least = (
        plan.choices["default"].fails is not None
        and plan.recommended == plan.control in plan.running
    )
    if why and least and not (directory / Verification.FILE).exists():
        say(f"accepted without `tccl verify`, as the least that runs: {why_not_default(plan)}")
        why = ""
    why = "is simulated" if plan.simulated else why
    why = "is a DRY RUN, which says nothing about GPUs" if plan.dry_run else why
    if not why:
        elsewhere = why_elsewhere(plan, directory, equal_hosts=request.equal_hosts, say=say)
        why = f"was measured on another machine: {elsewhere}" if elsewhere else ""
    if why and not request.force:
        raise InputError(str(directory), why, "measure and `tccl verify` it first, or add `force`")
    if why:
        say(f"{directory} {why}: accepted because of `force`")
    check_proof_holds(plan, directory, force=request.force, say=say)
    if newer_nccl and request.why_no_plugin(plan):
        request = replace(request, newest_nccl=_newest(plan, directory, request, say))
    return plan, deliver_to_host(plan, directory, request, say=say)


def _newest(plan: Plan, directory: Path, request: JobRequest, say: Say) -> str:
    """Return a later NCCL here with which the plugin's trial goes well; "" where none does."""
    nccl = planned_or_installed(plan)
    if why_no_plugin(nccl, newest=nccl):
        return ""
    try:
        return try_plugin(plugin_exports(plan, directory, equal_hosts=request.equal_hosts), nccl)
    except TcclError as error:
        say(f"the plugin's trial with NCCL {nccl} failed: {error}")
        return ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of all files with our block."""

    files: tuple[str, ...]
    format_version: int = FORMAT_VERSION


def install(delivery: Delivery, path: Path, *, dry_run: bool) -> Change:
    """Put a plan's lines into an nccl.conf, beside its other content.

    The file need not exist, its directory does; with `dry_run`, only return the change. Raises
    InputError, with the file unchanged: it may not or cannot change, has damaged markers, or has
    other lines that contradict the plan.
    """
    change = _change(delivery, path)
    if dry_run:
        return change
    directory = state_directory()
    with _opened_record(directory) as recorded:
        # The record first: an entry without a block does no harm, a block without an entry stays.
        _save_record(list(dict.fromkeys((*recorded, str(change.path)))), directory)
        try:
            apply_change(change)
        except BaseException:
            if not has_block(change.path):
                _save_record(recorded, directory)
            raise
    return change


def uninstall(paths: Sequence[Path] = (), *, dry_run: bool = False) -> tuple[Change, ...]:
    """Remove our block from all recorded files and NCCL's user file, or from these.

    With `dry_run`, change nothing. Files without a block have a change that is not `needed`. After
    an error the file and those after it stay recorded.
    """
    directory = state_directory()
    if dry_run:
        return _removal(paths, load_record(directory))
    with _opened_record(directory) as recorded:
        removal = _removal(paths, recorded)
        remaining = list(recorded)
        for change in removal:
            apply_change(change)
            # A recorded path may have become a link since.
            remaining = [p for p in remaining if os.path.realpath(p) != str(change.path)]
            _save_record(remaining, directory)
    return removal


def _removal(paths: Sequence[Path], recorded: Sequence[str]) -> tuple[Change, ...]:
    changes = []
    # The record of another XDG_STATE_HOME may have the user's file, which is by the plan's version
    # where no NCCL is installed.
    files = (user_file(), user_file(planned=ASSUMED))
    default = [path for path in files if has_block(path)]
    for path in dict.fromkeys(map(real_path, paths or [*map(Path, recorded), *default])):
        before = read_own(path) if path.exists() else None
        after = None if before is None else without_block(before, where=str(path))
        changes.append(Change(path=path, before=before, after=after))
    return tuple(changes)


def _change(delivery: Delivery, path: Path) -> Change:
    place, where = real_path(path), str(path)
    before = read_own(place)
    check_trusted(place.parent)
    own = user_file(planned=delivery.choice.settings.version)
    shared = place != real_path(own) and not why_closed(place.parent)
    for name in delivery.variables.values() if shared else ():
        # Those who cannot read what it names would have its variables alone: another choice.
        if name.startswith("/") and (why := why_closed(Path(name))):
            right = "open it to them, or move the plan; or leave out the plugin"
            raise InputError(where, f"is for all users, and {why}", right)
    remainder = None if before is None else without_block(before, where=where)
    if remainder is not None:
        _check_remainder(delivery, remainder, where)
    after = with_block(before, conf_body(delivery), where=where)
    return Change(path=place, before=before, after=after, shared=shared)


def _check_remainder(delivery: Delivery, remainder: bytes, where: str) -> None:
    """Check that other lines of the file do not contradict the plan's."""
    lines = {line.name: line for line in reversed(conf_lines(remainder, where=where))}
    if GRAPH_VARIABLE in lines:
        right = "take it out: it fails every communicator over other GPUs"
        raise InputError(lines[GRAPH_VARIABLE].where, f"sets {GRAPH_VARIABLE}", right)
    values = {name: line.value for name, line in lines.items()}
    names = [name for name in env_conflicts(delivery.choice.settings, values) if name in lines]
    planned = delivery.variables.items()
    names += [name for name, value in planned if values.get(name, value) != value]
    if names:
        fault = f"sets {names[0]}={values[names[0]][:60]}, against the plan's settings"
        raise InputError(lines[names[0]].where, fault, "take it out, or plan again with it")


def conf_body(delivery: Delivery) -> str:
    """Return our lines of nccl.conf."""
    if PLUGIN_VARIABLE not in delivery.variables:
        return conf_text(delivery.choice.settings, provenance=delivery.provenance)
    head = f"# tccl-py, rates {delivery.provenance}; `tccl show --sets` says for whom.\n"
    return head + "".join(f"{name}={value}\n" for name, value in delivery.variables.items())


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
    with explain_errors(directory, "cannot be made", "name a writable place by XDG_STATE_HOME"):
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
    with explain_errors(directory, "cannot be written", "make it writable"):
        (directory / RECORD_FILE).unlink(missing_ok=True)


# The plugin's trial with a later NCCL.


_READ = re.compile(r"(NCCL_[A-Z0-9_]{1,59}) set by environment to (\S{1,200}?)\.?$", re.MULTILINE)


def try_plugin(variables: Mapping[str, str], nccl: str) -> str:
    """Try the plugin that these variables load, with the installed NCCL; return its version.

    Raises MeasurementError: a check fails, or the trial cannot be made here.
    """
    if INDEX_VARIABLE not in variables:
        raise MeasurementError("a job over several hosts cannot be tried on one")
    index = read_index(Path(variables[INDEX_VARIABLE]))
    if not index.sets or (why := why_not_asked(index.gpus)):
        raise MeasurementError(why if index.sets else "the plan gives no set of GPUs anything")
    questions = [Question(gpus=gpus) for gpus in communicators(index)]
    environment = rank_environment({**variables, NEWER_VARIABLE: nccl}, connect=False)
    version, logs = run_questions(environment, questions)
    for question, of_ranks in zip(questions, logs, strict=True):
        for why in complaints(index, question, of_ranks, version):
            gpus = ",".join(map(str, question.gpus))
            raise MeasurementError(f"in a communicator over GPUs {gpus} {why}")
    return version


def communicators(index: Indexed) -> list[tuple[int, ...]]:
    """Return the GPUs of the communicators of a trial, in order."""
    by_size = sorted(index.sets, key=len)
    others = (pair for pair in combinations(index.gpus, 2) if pair not in index.sets)
    return [by_size[0], *list(others)[:1], by_size[-1], by_size[0]]


def complaints(
    index: Indexed, question: Question, logs: Sequence[CommunicatorLog], version: str
) -> Iterator[str]:
    """Yield what a communicator got otherwise than planned, as clauses."""
    gpus, file = question.gpus, index.sets.get(question.gpus, "")
    named = {"": "default NCCL: ", "-": "variables of "}.get(file, f"graph file {file} of ")
    given = index.given if file else {}
    for rank, log in enumerate(log.log for log in logs):
        if f"tccl: rank {rank} of {len(gpus)}: {named}" not in log:
            said = re.search(r"tccl: .{1,200}", log)
            yield f"the plugin says '{said[0] if said else ''}', and not '{named.rstrip(': ')}'"
        read = {name: value for name, value in _READ.findall(log) if name in index.given}
        if read != given:
            yield f"NCCL reads {read or 'no variables'}, and not {given or 'none'}"
        if (": tuned by " in log) != (gpus in index.tuned):
            yield f"NCCL asks {'the' if gpus not in index.tuned else 'no'} tuner"
    answer = read_answer(question, logs, version)
    if file not in ("", "-"):
        verdict = verdict_on(answer, read_text(index.folder / file), where=file)
        if verdict.verdict != "used":
            yield verdict.reason
