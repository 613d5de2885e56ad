"""`tccl install` and `tccl uninstall`: a plan's lines in nccl.conf, and their removal."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from tccl_py.cli import options
from tccl_py.cli.options import arg, flag, opt
from tccl_py.cli.process import notice
from tccl_py.delivery.job import JobRequest, gives_nothing
from tccl_py.delivery.plugin import PLUGIN_VARIABLE
from tccl_py.errors import InputError
from tccl_py.experiments.communication import verified_choice
from tccl_py.installation.blocks import Change, real_path
from tccl_py.installation.install import accept, state_directory
from tccl_py.installation.install import install as put
from tccl_py.installation.install import uninstall as take_out
from tccl_py.nccl_conf import CONF_VARIABLE, HOST_FILE, settings_of_files, user_file
from tccl_py.report.tables import communication_line

EQUAL_HOSTS = flag("--alike", "For hosts like the plan's, with other UUIDs.")
PLUGIN = flag("--plugin/--no-plugin", "Load the plugin where NCCL has plugins.", default=True)
NEWER = flag("--newer-nccl", "Try the plugin with a later NCCL here, load it if all goes well.")
FORCE = flag("--force", "Also if not verified, or of another machine.")


def install(
    directory: Path = options.DIRECTORY,
    *,
    conf: Path | None = opt("PATH", "A file in NCCL's form; yours by default."),
    dry_run: bool = options.DRY_RUN,
    workload: str | None = options.FOR_WORKLOAD,
    equal_hosts: bool = EQUAL_HOSTS,
    plugin: bool = PLUGIN,
    newer_nccl: bool = NEWER,
    force: bool = FORCE,
) -> None:
    """Put a verified plan into nccl.conf, where jobs find it.

    The lines stand between two marker lines and load the plan's plugin, which gives each
    communicator its graph file or default NCCL. Without the plugin they set variables alone. All
    hosts of a job need the same lines: without them it may hang. With --workload other jobs may
    lose.

    Examples:

        tccl install my-plan
        tccl install my-plan --conf /etc/nccl.conf
        tccl install my-plan --workload job.json
    """

    if str(conf) == "-":
        raise InputError("--conf -", "names no file", "`tccl export DIR -o OUT` writes nccl.conf")
    request = JobRequest(plugin=plugin, equal_hosts=equal_hosts, force=force)
    if workload is not None:
        found = verified_choice(directory, workload)
        request = replace(request, choice=found.chosen)
        notice(f"for {found.name} alone, other jobs may lose: {communication_line(found)}")
    plan, delivery = accept(directory, request, newer_nccl=newer_nccl, say=notice)
    own = user_file(planned=delivery.choice.settings.version)
    path = conf or own
    earlier = any(line.installed for line in settings_of_files({}, files=[path]).values())
    if gives_nothing(plan, directory, delivery) and not earlier:
        notice(f"{directory} keeps default NCCL: nothing to install, start jobs as usual")
        return
    change = put(delivery, path, dry_run=dry_run)
    verb = "make" if change.before is None else "change"
    past = "made" if change.before is None else "changed"
    done = f"would {verb} {change.path}" if dry_run else f"{past} {change.path}"
    notice(done if change.is_needed else f"{change.path} has the plan's lines already")
    _name_others(change, dry_run=dry_run)
    if not dry_run:
        loaded = PLUGIN_VARIABLE in delivery.variables
        jobs = "all NCCL jobs"
        if real_path(path) == real_path(own):
            jobs += " of yours"
        elif real_path(path) != real_path(HOST_FILE):
            jobs += f" with {CONF_VARIABLE}={path.absolute()}"
        notice(
            f"{'the plugin is loaded by' if loaded else 'the settings hold for'} {jobs}, on every "
            f"host that has {path}; one that runs now keeps what it has, and one over several "
            "hosts needs the same lines on all of them"
        )


def uninstall(
    files: list[Path] | None = arg("FILE", "Files to take it out of; all recorded if none.", None),
    *,
    dry_run: bool = options.DRY_RUN,
) -> None:
    """Take out the lines of `tccl install`; files that it made are removed.

    Other lines stay, also between the markers. Without FILE the files on record are taken, and
    your own file of NCCL.

    Examples:

        tccl uninstall
        tccl uninstall /etc/slurm/task_prolog.sh
    """

    removal = take_out(files or (), dry_run=dry_run)
    for change in removal:
        if change.before is None:
            notice(f"{change.path} does not exist")
        elif not change.is_needed:
            notice(f"{change.path} has no lines of a plan")
        elif change.after is None:
            done = "would remove" if dry_run else "removed"
            notice(f"{done} {change.path}, which was new")
        else:
            notice(f"{'would restore' if dry_run else 'restored'} {change.path}")
            _name_others(change, dry_run=dry_run)
    if not removal:
        notice(f"nothing is installed: neither {user_file()} nor a file in {state_directory()}")


def _name_others(change: Change, *, dry_run: bool) -> None:
    for line in change.others:
        stays = "would stay" if dry_run else "stays"
        notice(f"{line} was put between the markers and {stays} outside of them")
