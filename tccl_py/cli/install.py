"""`tccl install` and `tccl uninstall`: a plan's settings in files that jobs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tccl_py.cli import options
from tccl_py.cli.options import flag, opt
from tccl_py.cli.process import notice
from tccl_py.errors import InputError
from tccl_py.installation.blocks import HEADS, Kind
from tccl_py.installation.install import body_of, plan_to_install
from tccl_py.installation.install import install as put
from tccl_py.installation.install import uninstall as take_out
from tccl_py.nccl_library import user_file

_PRINTED = "-"


def install(
    directory: options.Directory,
    *,
    conf: Annotated[Path | None, opt("PATH", "A file in NCCL's form; yours by default.")] = None,
    slurm_prolog: Annotated[Path | None, opt("PATH", "A TaskProlog of SLURM, or -.")] = None,
    module: Annotated[Path | None, opt("PATH", "An environment module in Tcl, or -.")] = None,
    dry_run: options.DryRun = False,
    alike: Annotated[bool, flag("--alike", "For hosts like the plan's, with other UUIDs.")] = False,
    plugin: Annotated[
        bool, flag("--plugin/--no-plugin", "Load the plugin where NCCL has plugins.")
    ] = True,
    force: Annotated[bool, flag("--force", "Also if not verified, or of another machine.")] = False,
) -> None:
    """Put a verified plan where jobs find it.

    The plan's lines stand between two marker lines; others stay, byte for byte. They load the
    plan's plugin: NCCL 2.28.7 and later asks it for each communicator, and gets the graph file of
    exactly its GPUs, or none, and the variables of the recommended choice. Any doubt is default
    NCCL, and a user's own variables win.

    For an older NCCL, for a plan of several hosts, without the plugin's library, and with
    --no-plugin the lines set the variables alone. No line names a graph file: communicators over
    other GPUs would fail. `tccl_py.torch` finds the plan by TCCL_PLAN of the prolog and the module.

    Without an option the file is NCCL_CONF_FILE, or ~/.nccl.conf, for every process of yours. NCCL
    reads a file of the user's, then /etc/nccl.conf, and takes the first line of a name; the
    environment comes before both. The prolog sets nothing on hosts with other GPUs, driver or NUMA
    nodes, and no variable that the job has set. With - for PATH lines are printed.

    Examples:

        tccl install my-plan
        tccl install my-plan --slurm-prolog /etc/slurm/task_prolog.sh --module modules/tccl/1.0
        tccl install my-plan --slurm-prolog - --force
    """
    how = {"alike": alike, "plugin": plugin, "force": force}
    installed = plan_to_install(directory, **how, say=notice)
    named: dict[Kind, Path | None] = {"conf": conf, "slurm-prolog": slurm_prolog, "module": module}
    targets = {kind: path for kind, path in named.items() if path is not None}
    if conf is not None and str(conf) == _PRINTED:
        raise InputError("--conf -", "names no file", "`tccl export DIR -o OUT` writes nccl.conf")
    printed: list[Kind] = [kind for kind, path in targets.items() if str(path) == _PRINTED]
    files = {kind: path for kind, path in targets.items() if kind not in printed}
    if not targets:
        files = {"conf": user_file()}
    changes = put(installed, files, dry_run=dry_run)
    for kind in printed:
        print(HEADS[kind] + body_of(installed, kind), end="")
    made, changed = ("would make", "would change") if dry_run else ("made", "changed")
    for kind, change in zip(files, changes, strict=True):
        done = f"{made if change.before is None else changed} {change.path} ({kind})"
        notice(done if change.needed else f"{change.path} has the plan's lines already")
    if "conf" in files and not dry_run:
        what = "the plugin is loaded by" if installed.plugin else "the settings hold for"
        notice(
            f"{what} all NCCL jobs of yours, on every host that has "
            f"{files['conf']}; one that runs now keeps what it has"
        )


def uninstall(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Files to take it out of; all recorded if none."),
    ] = None,
    *,
    dry_run: options.DryRun = False,
) -> None:
    """Take out the lines of `tccl install`; files that it made are removed.

    Other lines stay. ~/.local/state/tccl (XDG_STATE_HOME) records the files, and goes with the
    last.

    Examples:

        tccl uninstall
        tccl uninstall /etc/slurm/task_prolog.sh
    """
    found = take_out(files or (), dry_run=dry_run)
    for change in found:
        if not change.needed:
            notice(f"{change.path} has no lines of a plan")
        elif change.after is None:
            done = "would remove" if dry_run else "removed"
            notice(f"{done} {change.path}, which was new")
        else:
            notice(f"{'would restore' if dry_run else 'restored'} {change.path}")
    if not found:
        notice("nothing is installed")
