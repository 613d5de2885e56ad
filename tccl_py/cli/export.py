"""`tccl export` and `install`: a plan's files for NCCL, runtimes and jobs; lines in nccl.conf."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from msgspec.structs import replace

from tccl_py.cli import options
from tccl_py.cli.options import arg, flag, opt, refuse
from tccl_py.cli.process import notice, notice_each, write_result
from tccl_py.delivery.job import JobRequest, gives_nothing
from tccl_py.delivery.plugin import PLUGIN_VARIABLE, check_trusted
from tccl_py.delivery.scripts import FORMS, Form, script
from tccl_py.errors import InputError, check_choice, require, spell
from tccl_py.experiments.communication import verified_choice
from tccl_py.experiments.record import Verification
from tccl_py.files import read_text
from tccl_py.installation.blocks import Change, real_path
from tccl_py.installation.install import accept, state_directory
from tccl_py.installation.install import install as put
from tccl_py.installation.install import uninstall as take_out
from tccl_py.nccl.settings import environment, environment_text
from tccl_py.nccl.tuner import ONE_CHANNEL, tuner_csv
from tccl_py.nccl_conf import CONF_VARIABLE, HOST_FILE, settings_of_files, user_file
from tccl_py.plan.directory import machine_file, nccl_files, write_nccl_files, write_new_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.machine_files import GRAPH_FILE
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import load_tuning, plan_in
from tccl_py.plan.staging import TABLES, check_files
from tccl_py.plan.tables import read_tables
from tccl_py.plan.text import advice
from tccl_py.planning.jobs import NoTableError, as_achieved, plan_of_job, write_bounded_job
from tccl_py.readers.hosts import gpus_of_hosts, listed_hosts
from tccl_py.report.tables import communication_line
from tccl_py.tccl_fork import fork_file

EQUAL_HOSTS = flag("--alike", "For hosts like the plan's, with other UUIDs.")
PLUGIN = flag("--plugin/--no-plugin", "Load the plugin where NCCL has plugins.", default=True)
NEWER = flag("--newer-nccl", "Try the plugin with a later NCCL here, load it if all goes well.")
FORCE = flag("--force", "Also if not verified, or of another machine.")
_RUNTIMES = ("nccl", "tccl", "tuner", *FORMS)


def export(
    directory: Path = options.PLAN_PATH,
    *,
    runtime: str = opt(
        "|".join(_RUNTIMES),
        "NCCL, TCCL's fork of 2.18, NCCL's example tuner, or a script for jobs.",
        default="nccl",
    ),
    output: Path | None = opt("DIR|FILE", "A new directory; else a new file.", "-o", "--output"),
    hosts: str | None = opt("LIST", "A job's hosts: a list, or a hostfile."),
    gpus: str | None = opt(
        "LIST", "The job's GPUs of a host, as 0-3, or as 'gpu[1-2]:0-3;gpu3:4,5'."
    ),
    keep_order: bool = flag("--keep-order", "Keep the order of --hosts."),
    equal_hosts: bool = EQUAL_HOSTS,
    plugin: bool = PLUGIN,
    newer_nccl: bool = NEWER,
    force: bool = FORCE,
) -> None:
    """Write the files that a runtime reads, or print the main one.

    For nccl these are graph files, nccl.conf and env.sh. With --hosts they are those of a job over
    some hosts of a cluster's plan, planned from its tables: nothing is measured, and no GPU is
    needed.

    Examples:

        tccl export my-plan -o /etc/tccl
        tccl export my-plan --runtime tccl -o my-plan.xml
        tccl export my-plan --runtime slurm-prolog -o /etc/slurm/task_prolog.sh
        tccl export my-cluster --hosts "$SLURM_JOB_NODELIST" -o job-$SLURM_JOB_ID
    """
    form = check_choice("--runtime", runtime, _RUNTIMES)
    if form != "nccl":
        refuse({"--hosts": hosts}, "is for another runtime, nccl", "leave --runtime out")
    if form not in FORMS:
        of_scripts = {"--alike": equal_hosts, "--newer-nccl": newer_nccl, "--force": force}
        of_scripts["--no-plugin"] = not plugin
        refuse(of_scripts, "is for scripts", f"add --runtime {' or '.join(FORMS)}")
    if hosts is not None:
        _export_job(directory, output, hosts, gpus, keep_order=keep_order)
        return
    if form in FORMS:
        request = JobRequest(plugin=plugin, equal_hosts=equal_hosts, force=force)
        _export_script(directory, output, form, request, newer_nccl=newer_nccl)
        return
    if form == "tccl":
        _export_fork(directory, output)
        return
    if form == "tuner":
        _export_tuner(directory, output)
        return
    plan = _mark_dry_run(load_plan(directory), directory)
    if output is not None:
        notice(f"wrote {write_nccl_files(plan, output)} files to {output}")
        return
    files, right = nccl_files(plan, directory), "name a new directory by --output"
    require(GRAPH_FILE in files, str(directory), "has a graph file for each host", right)
    print(files[GRAPH_FILE], end="")


def _mark_dry_run(plan: Plan, path: Path) -> Plan:
    """Return a plan to export; a notice says if it is of a dry run."""
    if plan.dry_run:
        notice(f"{path} is a DRY RUN: what is exported says nothing about GPUs, use it in no job")
    return plan


def _export_tuner(directory: Path, output: Path | None) -> None:
    """Write the tuner's tables to the new file `output`, or print them."""

    _check_new(output)
    plan = _mark_dry_run(plan_in(directory), directory)
    tuning = load_tuning(plan, directory)
    if tuning is None:
        raise InputError(str(directory), "was not tuned", "run tccl verify --tune there")
    text, left_out = tuner_csv(tuning.tables, plan.gpus)
    write_result(text, output)
    notice(ONE_CHANNEL)
    if left_out:
        notice(f"{left_out} entries of single sets of GPUs are left out: the file cannot name GPUs")


def _export_script(
    directory: Path, output: Path | None, form: Form, request: JobRequest, *, newer_nccl: bool
) -> None:
    """Write a script for jobs to the new file `output`, or print it."""

    _check_new(output)
    if output is not None and output.parent.is_dir():
        check_trusted(output.parent.resolve())
    if output is not None and form == "module" and output.suffix == ".lua":
        right = "name a Tcl module, which Lmod reads as well"
        raise InputError(str(output), "is for Lua", right)
    plan, delivery = accept(directory, request, newer_nccl=newer_nccl, say=notice)
    if gives_nothing(plan, directory, delivery):
        notice("nothing to set, so no script: jobs run as usual")
        return
    write_result(script(form, plan, directory, delivery, equal_hosts=request.equal_hosts), output)
    if output is not None and output.is_file() and form == "slurm-prolog":
        output.chmod(0o755)


def _check_new(output: Path | None) -> None:
    if output is not None and (output.is_file() or output.is_dir()):
        raise InputError(str(output), "already exists", "name a new file")


def _export_fork(directory: Path, output: Path | None) -> None:
    """Write the file of the TCCL fork's runtime to the new file `output`, or print it."""

    _check_new(output)
    plan = _mark_dry_run(load_plan(directory), directory)
    place = directory if directory.is_dir() else directory.parent
    tables = read_tables(place, plan.cluster.classes) if (place / TABLES).is_dir() else ()
    made = fork_file(plan, tables)
    write_result(made.text, output)
    notice_each(made.notes)
    if output is not None:
        notice(f"wrote {spell(made.paths, 'chain' if tables else 'ring')} to {output}")


def _export_job(
    directory: Path, output: Path | None, hosts: str, gpus: str | None, *, keep_order: bool
) -> None:
    """Write the files of a job over some hosts of a cluster's plan."""

    if output is None:
        right = "name a new directory that all hosts of the job can read"
        raise InputError("--hosts", "makes a file for each host", f"add -o DIR: {right}")
    plan = _mark_dry_run(plan_in(directory), directory)
    listed = listed_hosts(hosts, where="--hosts")
    of_hosts = gpus_of_hosts(gpus, [host.name for host in listed])
    try:
        made = plan_of_job(plan, directory, listed, of_hosts, keep_order=keep_order)
    except NoTableError as missing:
        count, rate, settings = write_bounded_job(
            plan, directory, listed, of_hosts, output=output, missing=missing
        )
        notice(f"wrote {spell(count, 'file')} to {output}: rate {rate}")
        variables = environment_text(settings)
        how = (
            f"Set {variables}, as default NCCL leaves rails" if variables else "Leave NCCL as it is"
        )
        notice(f"{how}: no rings over these GPUs were measured.")
        notice(str(missing))
        return
    verification = Verification.load(directory)
    if verification is not None and verification.backend == "cuda" and not verification.simulated:
        made = as_achieved(made, plan, verification.achieved, verification.winner)
    planned, classes = plan.cluster.host_classes, made.cluster.classes
    numbers = {classes[made.class_number(host)].name: planned[host.name] for host in made.hosts}
    files = {name: machine_file(plan, directory, number) for name, number in numbers.items()}
    check_files(directory, [str(path.relative_to(directory)) for path in files.values()])
    count = write_new_plan(made, output, {name: read_text(path) for name, path in files.items()})
    rate = f"{made.rate_gbps:.2f} GB/s ({made.provenance_of('graph')})"
    notice(f"wrote {spell(count, 'file')} to {output}: {rate}")
    notice(advice(made))
    notice_each(made.notices)
    if made.recommended == "default" and not environment(made.job_settings):
        notice("nothing to set: start the job as usual")
        return
    env_file = quote(f"{output}/nccl/env.sh")
    launch = f"{output}/nccl/order/launch.txt"
    notice(f"start the job as {launch} says, each rank after its own `. {env_file}`")


# In nccl.conf


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
