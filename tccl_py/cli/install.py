"""`tccl install` and `tccl uninstall`: a plan's lines in nccl.conf, and their removal."""

from __future__ import annotations

from pathlib import Path

from tccl_py.cli import options
from tccl_py.cli.options import arg, flag, opt
from tccl_py.cli.process import notice
from tccl_py.delivery.job import JobRequest
from tccl_py.delivery.plugin import PLUGIN_VARIABLE
from tccl_py.errors import InputError
from tccl_py.nccl_library import user_file

HOSTS_ALIKE = flag("--alike", "For hosts like the plan's, with other UUIDs.")
PLUGIN = flag("--plugin/--no-plugin", "Load the plugin where NCCL has plugins.", default=True)
NEWER = flag("--newer-nccl", "Load the plugin also for an untried NCCL.")
FORCE = flag("--force", "Also if not verified, or of another machine.")


def install(
    directory: Path = options.DIRECTORY,
    *,
    conf: Path | None = opt("PATH", "A file in NCCL's form; yours by default."),
    dry_run: bool = options.DRY_RUN,
    alike: bool = HOSTS_ALIKE,
    plugin: bool = PLUGIN,
    newer_nccl: bool = NEWER,
    force: bool = FORCE,
) -> None:
    """Put a verified plan into nccl.conf, where jobs find it.

    The plan's lines stand between two marker lines; others stay, byte for byte. They load the
    plan's plugin: NCCL 2.28.7 to 2.32 asks it for each communicator, and gets the graph file of
    exactly its GPUs, or none. They also set the variables that the plugin needs, alike for all
    ranks. Any doubt is default NCCL, and a user's own variables win. With --newer-nccl a later NCCL
    gets the plugin too, which then relies on its checks alone.

    For an older NCCL, for a plan of several hosts, without the plugin's library, and with
    --no-plugin the lines set the variables alone. No line names a graph file: communicators over
    other GPUs would fail.

    Without --conf the file is NCCL_CONF_FILE, or ~/.nccl.conf, for every process of yours. NCCL
    reads a file of the user's, then /etc/nccl.conf, and takes the first line of a name; the
    environment comes before both. All hosts of a job need the same lines: without them it may hang.
    Where hosts of several kinds share a home, `tccl export --runtime slurm-prolog` or `module`
    makes a script that jobs load.

    Examples:

        tccl install my-plan
        tccl install my-plan --conf /etc/nccl.conf
    """
    from tccl_py.installation.install import accept  # noqa: PLC0415 (slow)
    from tccl_py.installation.install import install as put  # noqa: PLC0415

    path = conf or user_file()
    if str(path) == "-":
        raise InputError("--conf -", "names no file", "`tccl export DIR -o OUT` writes nccl.conf")
    request = JobRequest(plugin=plugin, alike=alike, newer_nccl=newer_nccl, force=force)
    _, delivery = accept(directory, request, say=notice)
    change = put(delivery, path, dry_run=dry_run)
    verb = "make" if change.before is None else "change"
    past = "made" if change.before is None else "changed"
    done = f"would {verb} {change.path}" if dry_run else f"{past} {change.path}"
    notice(done if change.needed else f"{change.path} has the plan's lines already")
    if not dry_run:
        loaded = PLUGIN_VARIABLE in delivery.variables
        notice(
            f"{'the plugin is loaded by' if loaded else 'the settings hold for'} all NCCL jobs of "
            f"yours, on every host that has {path}; one that runs now keeps what it has, and one "
            "over several hosts needs the same lines on all of them"
        )


def uninstall(
    files: list[Path] | None = arg("FILE", "Files to take it out of; all recorded if none.", None),
    *,
    dry_run: bool = options.DRY_RUN,
) -> None:
    """Take out the lines of `tccl install`; files that it made are removed.

    Other lines stay. .local/state/tccl in your home (XDG_STATE_HOME) records the files, and goes
    with the last. NCCL's file of yours is looked through without a record too. SLURM prologs and
    environment modules that earlier versions installed are files like these.

    Examples:

        tccl uninstall
        tccl uninstall /etc/slurm/task_prolog.sh
    """
    from tccl_py.installation.install import state_directory  # noqa: PLC0415 (slow)
    from tccl_py.installation.install import uninstall as take_out  # noqa: PLC0415

    removal = take_out(files or (), dry_run=dry_run)
    for change in removal:
        if not change.needed:
            notice(f"{change.path} has no lines of a plan")
        elif change.after is None:
            done = "would remove" if dry_run else "removed"
            notice(f"{done} {change.path}, which was new")
        else:
            notice(f"{'would restore' if dry_run else 'restored'} {change.path}")
    if not removal:
        notice(f"nothing is installed: neither {user_file()} nor a file in {state_directory()}")
