"""`tccl export`, `install` and `uninstall`: a plan's files elsewhere, and its lines for jobs."""

from __future__ import annotations

from pathlib import Path

from tccl_py.cli import options
from tccl_py.cli.options import arg, flag, one_of, opt, refuse
from tccl_py.cli.process import notice, notice_each, write_result
from tccl_py.errors import InputError, counted
from tccl_py.files import read_text
from tccl_py.installation.blocks import HEADS, Kind
from tccl_py.installation.install import body_of, plan_to_install, state_directory
from tccl_py.installation.install import install as put
from tccl_py.installation.install import uninstall as take_out
from tccl_py.nccl_library import user_file
from tccl_py.plan.beside import plan_in
from tccl_py.plan.directory import GRAPH_FILE, machine_file
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.staging import check_files
from tccl_py.plan.writing import nccl_files, write_job, write_nccl_files
from tccl_py.readers.hosts import gpus_of_hosts, listed_hosts


def export(
    directory: Path = options.PLAN_PATH,
    *,
    runtime: str = opt(
        "nccl|tccl|tuner", "NCCL, TCCL's fork of 2.18, or NCCL's example tuner.", default="nccl"
    ),
    output: Path | None = opt("DIR|FILE", "A new directory; else a new file.", "-o", "--output"),
    hosts: str | None = opt("LIST", "A job's hosts: a list, or a file of one."),
    gpus: str | None = opt(
        "LIST", "The job's GPUs of a host, as 0-3, or as 'gpu[1-2]:0-3;gpu3:4,5'."
    ),
    keep_order: bool = flag("--keep-order", "Keep the order of --hosts."),
) -> None:
    """Write the files that a runtime reads, or print the main one.

    For nccl these are the graph files, nccl.conf and env.sh; for a cluster's plan a graph file for
    each host, and the order of hosts for launchers.

    With --hosts, these are the files of a job over some hosts of a cluster's plan, with plan.json:
    as if the job's hosts were planned alone, but by the tables in DIR, so nothing is measured, and
    no GPU is needed. LIST has the form of any hostfile, or of $SLURM_JOB_NODELIST; slots are the
    number of GPUs, lowest indices first. Hosts may use different GPUs. GPUs that no table is for,
    nor for GPUs equal to them, get default NCCL, with an upper bound in place of a rate, and no
    plan.json: only env.sh, nccl.conf and the files for launchers.

    For tccl: the XML file of the TCCL fork (TCCL_XML_FILE, with NCCL_ALGO=TCCL,RING), whose runtime
    moves every hop by the mechanism in the file. It has the plan's fastest ring, and the rings over
    smaller sets of GPUs where the plan has some. Of a cluster's plan, which needs equal nodes, it
    has the chains of the plan's tables, for the sets of GPUs of `tccl plan --gpus-per-job`, and no
    rings inside a node. Parts of the plan that the file cannot express are named in notices, and in
    a comment of the file.

    For tuner: the CSV file of the example tuner in NCCL's sources (NCCL_TUNER_CONFIG_FILE), with
    the tables that `tccl verify --tune` measured, for those who do not use tccl's plugin.

    Examples:

        tccl export my-plan --runtime nccl -o /etc/tccl
        tccl export my-plan --runtime tccl -o my-plan.xml
        tccl export my-cluster --hosts "$SLURM_JOB_NODELIST" -o job-$SLURM_JOB_ID
    """
    one_of("--runtime", runtime, ("nccl", "tccl", "tuner"))
    if runtime != "nccl":
        refuse({"--hosts": hosts}, ("", "is for another runtime, nccl", "leave --runtime out"))
    if hosts is None:
        refuse({"--gpus": gpus, "--keep-order": keep_order}, ("", "is for a job", "add --hosts"))
    else:
        _export_job(directory, output, hosts, gpus, keep_order=keep_order)
        return
    if runtime == "tccl":
        _export_fork(directory, output)
        return
    if runtime == "tuner":
        _export_tuner(directory, output)
        return
    plan = _marked(load_plan(directory), directory)
    if output is not None:
        notice(f"wrote {write_nccl_files(plan, output)} files to {output}")
        return
    plan.check_single(directory, "there is a file for each host: name a new directory by --output")
    print(nccl_files(plan, directory)[GRAPH_FILE], end="")


def _marked(plan: Plan, path: Path) -> Plan:
    """Return a plan to export; a notice says if it is of a dry run."""
    if plan.dry_run:
        notice(f"{path} is a DRY RUN: what is exported says nothing about GPUs, use it in no job")
    return plan


def _export_tuner(directory: Path, output: Path | None) -> None:
    """Write the tuner's tables to the new file `output`, or print them."""
    from tccl_py.nccl.tuner import ONE_CHANNEL, tuner_csv  # noqa: PLC0415
    from tccl_py.plan.beside import load_tuning  # noqa: PLC0415

    _check_new(output)
    plan = _marked(plan_in(directory), directory)
    tuning = load_tuning(plan, directory)
    if tuning is None:
        raise InputError(str(directory), "was not tuned", "run tccl verify --tune there")
    text, left_out = tuner_csv(tuning.tables, plan.gpus)
    write_result(text, output)
    notice(ONE_CHANNEL)
    if left_out:
        notice(f"{left_out} entries of single sets of GPUs are left out: the file cannot name GPUs")


def _check_new(output: Path | None) -> None:
    if output is not None and (output.is_file() or output.is_dir()):
        raise InputError(str(output), "already exists", "name a new file")


def _export_fork(directory: Path, output: Path | None) -> None:
    """Write the file of the TCCL fork's runtime to the new file `output`, or print it."""
    from tccl_py.plan.tables import read_tables  # noqa: PLC0415
    from tccl_py.tccl_fork import fork_file  # noqa: PLC0415 (slow)

    _check_new(output)
    plan = _marked(load_plan(directory), directory)
    place = directory if directory.is_dir() else directory.parent
    made = fork_file(plan, read_tables(place, plan.cluster.classes) if plan.is_cluster else ())
    write_result(made.text, output)
    notice_each(made.notes)
    if output is not None:
        notice(f"wrote {counted(made.paths, 'chain' if plan.is_cluster else 'ring')} to {output}")


def _export_job(
    directory: Path, output: Path | None, hosts: str, gpus: str | None, *, keep_order: bool
) -> None:
    """Write the files of a job over some hosts of a cluster's plan."""
    from tccl_py.experiments.record import Verification  # noqa: PLC0415 (slow)
    from tccl_py.plan.table_jobs import NoTableError, as_achieved, plan_of_job, write_bounded_job  # noqa: PLC0415 (slow)

    if output is None:
        right = "name a new directory that all hosts of the job can read"
        raise InputError("--hosts", "makes a file for each host", f"add -o DIR: {right}")
    plan = _marked(plan_in(directory), directory)
    if not plan.is_cluster:
        raise InputError("--hosts", "is for the plan of a cluster", "leave it out")
    listed = listed_hosts(hosts, where="--hosts")
    of_hosts = gpus_of_hosts(gpus, [host.name for host in listed])
    try:
        made = plan_of_job(plan, directory, listed, of_hosts, keep_order=keep_order)
    except NoTableError as missing:
        count, rate = write_bounded_job(
            plan, directory, listed, of_hosts, output=output, missing=missing
        )
        notice(f"wrote {counted(count, 'file')} to {output}: rate {rate}")
        notice("Leave NCCL as it is: no rings over these GPUs were measured.")
        notice(str(missing))
        return
    verification = Verification.load(directory)
    if verification is not None and verification.backend == "cuda" and not verification.simulated:
        made = as_achieved(made, plan, verification.achieved, verification.winner)
    planned, names = plan.cluster.host_classes, [one.name for one in made.cluster.classes]
    numbers = {names[made.class_number(host)]: planned[host.name] for host in made.hosts}
    files = {name: machine_file(plan, directory, number) for name, number in numbers.items()}
    check_files(directory, [str(path.relative_to(directory)) for path in files.values()])
    count = write_job(made, output, {one: read_text(path) for one, path in files.items()})
    notice(
        f"wrote {counted(count, 'file')} to {output}: {made.rate_gbps:.2f} GB/s ({made.provenance})"
    )
    notice(made.advice)
    notice_each(made.notices)
    notice(f"start the job as {output}/nccl/order/launch.txt says, after `. {output}/nccl/env.sh`")


# `tccl install` and `tccl uninstall`

_PRINTED = "-"


def install(
    directory: Path = options.DIRECTORY,
    *,
    conf: Path | None = opt("PATH", "A file in NCCL's form; yours by default."),
    slurm_prolog: Path | None = opt("PATH", "A TaskProlog of SLURM, or -."),
    module: Path | None = opt("PATH", "An environment module in Tcl, or -."),
    dry_run: bool = options.DRY_RUN,
    alike: bool = flag("--alike", "For hosts like the plan's, with other UUIDs."),
    plugin: bool = flag(
        "--plugin/--no-plugin", "Load the plugin where NCCL has plugins.", default=True
    ),
    newer_nccl: bool = flag("--newer-nccl", "Load the plugin also for an untried NCCL."),
    force: bool = flag("--force", "Also if not verified, or of another machine."),
) -> None:
    """Put a verified plan where jobs find it.

    The plan's lines stand between two marker lines; others stay, byte for byte. They load the
    plan's plugin: NCCL 2.28.7 to 2.32 asks it for each communicator, and gets the graph file of
    exactly its GPUs, or none. They also set the variables that the plugin needs, alike for all
    ranks. Any doubt is default NCCL, and a user's own variables win. With --newer-nccl a later NCCL
    gets the plugin too, which then relies on its checks alone.

    For an older NCCL, for a plan of several hosts, without the plugin's library, and with
    --no-plugin the lines set the variables alone. No line names a graph file: communicators over
    other GPUs would fail. `tccl_py.torch` finds the plan by TCCL_PLAN of the prolog and the module.

    Without an option the file is NCCL_CONF_FILE, or ~/.nccl.conf, for every process of yours. NCCL
    reads a file of the user's, then /etc/nccl.conf, and takes the first line of a name; the
    environment comes before both. All hosts of a job need the same lines: without them it may hang.
    The prolog of a plan of one host sets nothing in jobs over several nodes, on hosts with other
    GPUs, driver or NUMA nodes, and no variable that the job has set. With - for PATH lines are
    printed.

    Examples:

        tccl install my-plan
        tccl install my-plan --slurm-prolog /etc/slurm/task_prolog.sh --module modules/tccl/1.0
        tccl install my-plan --slurm-prolog - --force
    """
    how = {"alike": alike, "plugin": plugin, "force": force, "newer_nccl": newer_nccl}
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
            f"{files['conf']}; one that runs now keeps what it has, and one over several hosts "
            "needs the same lines on all of them"
        )


def uninstall(
    files: list[Path] | None = arg("FILE", "Files to take it out of; all recorded if none.", None),
    *,
    dry_run: bool = options.DRY_RUN,
) -> None:
    """Take out the lines of `tccl install`; files that it made are removed.

    Other lines stay. .local/state/tccl in your home (XDG_STATE_HOME) records the files, and goes
    with the last. NCCL's file of yours is looked through without a record too.

    Examples:

        tccl uninstall
        tccl uninstall /etc/slurm/task_prolog.sh
    """
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
