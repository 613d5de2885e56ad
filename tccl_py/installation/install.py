"""Installing a plan's settings into files, and taking them out: all of them, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import sweep_beside
from tccl_py.installation.changes import Change, make, read_own, real_place
from tccl_py.installation.parts import has_part, with_part, without_part
from tccl_py.installation.record import (
    InstalledFile,
    load_record,
    opened_record,
    save_record,
    state_directory,
)
from tccl_py.installation.texts import HEADS, Form, Installed, Kind, form_of
from tccl_py.nccl.conf import conf_lines
from tccl_py.nccl.pinned_env import against

_SHELLS = ("sh", "bash", "dash", "ksh", "zsh", "busybox")
_GRAPH = "NCCL_GRAPH_FILE"


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """What taking everything out does: files that change or go, and those that have no part."""

    changes: tuple[Change, ...]
    untouched: tuple[Path, ...]


def install(plan: Installed, targets: Mapping[Kind, Path], *, dry_run: bool) -> tuple[Change, ...]:
    """Put a plan into these files, each with what else is in it left as it is.

    Args:
        plan: what jobs are to find.
        targets: a file for each kind; files need not exist, directories do.
        dry_run: only say what would change.

    Raises:
        InputError: a file that must not or cannot be changed, damaged markers in one, or lines of
            others in it that say something else. No file is changed then.
    """
    changes = tuple(_change(plan, kind, path) for kind, path in targets.items())
    places = [change.path for change in changes]
    if len(set(places)) != len(places):
        raise InputError(str(places[0]), "is named for two things", "name a file for each")
    if dry_run:
        return changes
    added = tuple(
        InstalledFile(path=str(change.path), kind=kind, plan=str(plan.directory))
        for kind, change in zip(targets, changes, strict=True)
    )
    directory = state_directory()
    with opened_record(directory) as record:
        for change in changes:
            sweep_beside(change.path)
        # The record first: what it names and is not there does no harm, the reverse would stay.
        if record.with_files(added) != record:
            save_record(record.with_files(added), directory)
        try:
            make(changes)
        except BaseException:
            save_record(record, directory)
            raise
    return changes


def removal(paths: Sequence[Path] = ()) -> Removal:
    """What `uninstall` would do to all recorded files, or to these.

    Raises:
        InputError: a file cannot be changed, or its markers are damaged.
    """
    found = paths or [Path(one.path) for one in load_record(state_directory()).files]
    changes, untouched = [], []
    for path in dict.fromkeys(real_place(one) for one in found):
        change = _taken_out(path)
        if change is None:
            untouched.append(path)
        else:
            changes.append(change)
    return Removal(changes=tuple(changes), untouched=tuple(untouched))


def uninstall(paths: Sequence[Path] = ()) -> Removal:
    """Take our part out of all recorded files, or of these: they are as before then.

    Raises:
        InputError: as `removal`; nothing is changed then.
    """
    directory = state_directory()
    with opened_record(directory) as record:
        found = removal(paths)
        for path in (*(one.path for one in found.changes), *found.untouched):
            sweep_beside(path)
        make(found.changes)
        gone = {str(path) for path in (*(one.path for one in found.changes), *found.untouched)}
        if record.files:
            save_record(record.without(gone), directory)
    return found


def _change(plan: Installed, kind: Kind, path: Path) -> Change:
    place = real_place(path)
    before = read_own(place)
    form = form_of(plan, kind, path)
    where = str(path)
    others = None if before is None else without_part(before, heads=HEADS, where=where)
    if others is not None:
        _check_others(plan, kind, others, where, form)
    after = with_part(before, form.body, comment=form.comment, head=form.head, where=where)
    return Change(path=place, before=before, after=after, mode=form.mode)


def _taken_out(path: Path) -> Change | None:
    """The change that takes our part out of a file; None if it is not in there."""
    if not path.exists():
        return None
    before = read_own(path)
    if before is None or not has_part(before, where=str(path)):
        return None
    after = without_part(before, heads=HEADS, where=str(path))
    return Change(path=path, before=before, after=after)


def _check_others(plan: Installed, kind: Kind, others: bytes, where: str, form: Form) -> None:
    """Refuse a file in which our lines would not do what they are for, or harm."""
    if kind == "conf":
        _check_conf(plan, others, where)
    elif kind == "slurm-prolog":
        first = others.partition(b"\n")[0].decode("utf-8", "replace")
        words = first.removeprefix("#!").replace("/", " ").split()
        if first.startswith("#!") and not set(words) & set(_SHELLS):
            raise InputError(where, f"is for {first[2:40].strip()}", "name a shell's script")
    elif form.comment == "#" and others and not others.startswith(b"#%Module"):
        raise InputError(where, "is no module file", "its first line begins with #%Module")


def _check_conf(plan: Installed, others: bytes, where: str) -> None:
    lines = {line.name: line for line in reversed(conf_lines(others, where=where))}
    if _GRAPH in lines:
        raise InputError(
            lines[_GRAPH].where,
            f"sets {_GRAPH}",
            "take it out: it fails every communicator over other GPUs",
        )
    given = {name: line.value for name, line in lines.items()}
    names = [name for name in against(plan.settings, given) if name in lines]
    names += [
        name
        for name, value in plan.variables.items()
        if name in given and given[name] != value and name not in names
    ]
    if names:
        raise InputError(
            lines[names[0]].where,
            f"sets {names[0]}={given[names[0]][:60]}, against the plan's settings",
            "take it out, or plan again with it",
        )
