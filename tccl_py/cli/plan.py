"""`tccl plan`: rings for a machine or a cluster, and the files that make NCCL use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from msgspec.structs import replace

from tccl_py.cli import options
from tccl_py.cli.options import (
    advanced,
    advanced_flag,
    arg,
    flag,
    opt,
    p2p_argument,
    refuse,
)
from tccl_py.cli.output import GOOD, ProgressLine, grid, results
from tccl_py.cli.process import notice, notice_each, print_json
from tccl_py.errors import (
    CTRL_C_AND_SIGTERM,
    InputError,
    Terminated,
    check_range,
    defer_signals,
    interrupts_put_off,
    spell,
)
from tccl_py.interrupts import INTERRUPTED
from tccl_py.launchers import in_job
from tccl_py.model.cluster import parse_gpus
from tccl_py.model.measurement import JOURNAL_FILE
from tccl_py.nccl.settings import MAX_GID_INDEX, pinned_env_text
from tccl_py.nccl.versions import asked_version, known_versions
from tccl_py.plan.directory import files_of, write_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import ProvenLinks
from tccl_py.plan.text import (
    CHOICE_WORDS,
    advice,
    assumptions,
    choice_words,
    doctor_first,
    notices,
    planned_gpus,
)
from tccl_py.planning.hardware import limit_sentences
from tccl_py.planning.opening import UNDER_MPI, Prove, Subject, machine_subject, ring_counts_of
from tccl_py.planning.output import holds_measurements, holds_whole_plan, output_directory
from tccl_py.planning.request import DEFAULT_BUDGET, EVERY_SET, PlanRequest, pinned_here
from tccl_py.search.problem import Budget
from tccl_py.search.strategies import STRATEGIES
from tccl_py.simulator.descriptions import bundled_names
from tccl_py.sources.bench import Bench

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tccl_py.experiments.communication import Communication
    from tccl_py.health.proving import ProvenHost
    from tccl_py.model.links import Proof
    from tccl_py.model.measurement import Backend
    from tccl_py.nccl.asked import AskedJob
    from tccl_py.simulator.model import MachineModel
    from tccl_py.sources.hosts import Job
    from tccl_py.workloads.workload import Workload

_SETS = DEFAULT_BUDGET.sets or 1
HOST_SETS = 1250
"""At 30 a second they take most of the minute in which 8 GPUs are planned."""
_DRY_SETS = 40
_AS_GIVEN = (
    *("simulate", "cpu", "noise", "seed", "backend", "devices", "target", "interfaces", "nodes"),
    *("hosts", "switches", "gpus", "strategy", "keep_order", "gpus_per_job", "prove"),
)
"""Options that are fields of a request."""


def plan(
    output: Path = arg("DIR", "Where the plan's files go; a new one, or resumed."),
    *,
    simulate: str | None = options.SIMULATE,
    gpus: str | None = options.GPUS,
    nccl: str | None = opt("VERSION", f"The jobs'; {', '.join(known_versions())} were checked."),
    workload: str | None = opt("FILE|NAME", "Recommend what is best for this job."),
    nodes: int | None = opt("N", "How many equal nodes to simulate."),
    hosts: str | None = opt("LIST", "All hosts of the plan: a list, or a hostfile."),
    force: bool = flag("--force", "Plan anew, and replace the plan in DIR."),
    json: bool = options.JSON,
    pin_env: list[str] | None = advanced("NCCL_NAME", "A variable of all jobs."),
    tune: bool | None = advanced_flag(
        "--tune/--no-tune",
        "Then verify the plan by NCCL's collectives and try other settings: 10 minutes or "
        "more. The default only of hosts that talk over sockets.",
        default=None,
    ),
    prove: bool = options.PROVE,
    backend: str | None = advanced("cuda|host", options.BACKEND_HELP),
    devices: int | None = options.DEVICES,
    target: float | None = options.TARGET,
    rings: str | None = advanced("LIST", "Rings together; 1,2,4 if not given."),
    strategy: str = advanced("NAME", f"One of {', '.join(STRATEGIES)}.", default="best-first"),
    max_sets: int | None = advanced(
        "N",
        f"Sets to measure at most; if not given {HOST_SETS} of this machine, {_DRY_SETS} in a dry "
        f"run, else {_SETS}. Over hosts: of each class, besides those that any plan needs.",
    ),
    max_seconds: float | None = advanced("S", "Seconds to measure at most."),
    p2p: str | None = options.P2P,
    cpu: str | None = options.CPU,
    noise: float | None = options.NOISE,
    seed: int | None = options.SEED,
    switches: Path | None = advanced("FILE", "Switches (topology.conf, or YAML) or cables."),
    keep_order: bool = advanced_flag("--keep-order", "Keep the order of the hosts."),
    gpus_per_job: str | None = advanced(
        "LIST", "GPUs of a host that jobs use, as 8,4,4-7,0+2, or `all` for every set of them."
    ),
    gid_index: int | None = advanced("N", "NCCL_IB_GID_INDEX of RoCE ports."),
    interfaces: str | None = options.INTERFACES,
) -> None:
    """Find the best rings for a machine or a cluster, and write the files that make NCCL use them.

    Rates are measured on idle GPUs, of this machine or, under mpirun or srun, of the job's hosts;
    with --simulate they come from a model. Hosts that the plan in DIR lacks are added. After Ctrl-C
    the best plan so far is written, and the same command resumes.

    Examples:

        tccl plan my-plan
        tccl plan asus-plan --simulate asus-esc8000a-e13p
        tccl plan expert-plan --simulate asus-esc8000a-e13p --workload mixture-of-experts
        tccl plan sixteen-hosts --simulate nvswitch-8gpu-8nic --nodes 16
        NCCL_P2P_DISABLE=1 tccl plan no-p2p-plan --pin-env NCCL_P2P_DISABLE
        mpirun -N 1 tccl plan gpu-cluster --switches topology.conf
        mpirun -N 1 --host new1,new2 tccl plan gpu-cluster
    """
    if simulate is None and str(output) in bundled_names() and not output.exists():
        right = f"write --simulate {output}, and a DIR of another name"
        raise InputError(f"DIR {output}", "is a bundled machine", right)
    as_given = {name: value for name, value in locals().items() if name in _AS_GIVEN}
    request = PlanRequest(
        **as_given,
        p2p=p2p_argument(p2p),
        version=None if nccl is None else asked_version(nccl),
        pinned_env=pinned_here(pin_env or ()),
        ring_counts=ring_counts_of(rings),
        budget=_budget(
            backend, max_sets, max_seconds, here=simulate is None and not (in_job() or hosts)
        ),
        ib_gid_index=gid_index,
        subsets=True if gpus_per_job == EVERY_SET else None,
    )
    ranks = in_job()
    _check(request, in_job=ranks, tune=tune)
    several = ranks or request.names_hosts
    job_of, predicted = None if workload is None else _job_workload(workload), None
    line = ProgressLine(*(() if several else (request.budget.sets, request.budget.seconds)))
    request = replace(request, reporter=line)
    with ExitStack() as stack:
        if tune and not several:
            _check_tuning()
        job = None
        if ranks:
            from tccl_py.cli.measure import controlled_job  # noqa: PLC0415 (under MPI alone)

            job = stack.enter_context(controlled_job())
        known = None if force else output
        proves = _prove_for(request, job, known)
        if several:
            from tccl_py.planning.opening_hosts import cluster_subject  # noqa: PLC0415 (slow)

            subject = cluster_subject(request, job, stack, notice, known)
        else:
            subject = machine_subject(request, notice, proves)
        if job is not None and tune:
            _check_tuning(job)
        with output_directory(output, force=force or subject.grows) as journal:
            # Until the new plan is whole.
            stays = holds_whole_plan(output)
            with _planning(journal, output), line:
                notice_each(subject.keep_in(journal, line.count_sets, replace=force))
                made = subject.search()
                if job_of is not None:
                    made, predicted, _ = plan_by_workload(
                        made, job_of, None if several else subject.model
                    )
                made = until_jobs_decide(made)
            if not (stays and made.cancelled):
                _write(made, output, subject)
            if not made.cancelled:
                made = _tune(made, output, subject.source, job, tune)
    if json:
        print_plan_json(made, output, predicted)
        notice(f"wrote {output}")
    else:
        _print_end(made, output, subject)
    if made.cancelled:
        again = "the same command goes on from there"
        held = "the plan from before" if stays else "the best so far, a usable plan"
        notice(f"interrupted: {output} has {held}; {again}")
        raise typer.Exit(INTERRUPTED)


def _job_workload(text: str) -> Callable[[int], Workload]:
    """Return a workload by its number of ranks."""
    from tccl_py.workloads.sources import workload_for  # noqa: PLC0415 (slow)

    return workload_for(text)


def print_plan_json(plan: Plan, directory: Path, workload: Communication | None = None) -> None:
    """Print a plan as JSON, with NCCL's choices by message size, and those that tuning found.

    A `workload` is what is predicted for a job.
    """
    from tccl_py.report.plan import report_plan  # noqa: PLC0415 (not for a plan as text)

    print_json(report_plan(plan, directory, workload))


def _print_end(made: Plan, output: Path, subject: Subject) -> None:
    """Print what to know of a new plan in at most eight lines; `tccl show` has the rest."""
    console, name = results(), made.recommended
    known = {CHOICE_WORDS[way]: made.choices[way].best_known_gbps for way in ("default", name)}
    rates = (f"{rate or nan:.2f} GB/s by {way}" for way, rate in known.items())
    _, slowest = made.bottleneck
    shared = f"in each of {made.ring_count} rings" if made.ring_count > 1 else "in the ring"
    limit = f"{slowest.flow.words}, {slowest.rate_gbps:.2f} GB/s {shared}"
    if made.rate_gbps < 0.99 * made.ring_count * slowest.rate_gbps:
        limit = "what rings share on the way between hosts"
    limits = [text.partition(": ")[0] for text in limit_sentences(made)]
    # Rings of a graph file that is not recommended say nothing of other, slower ones.
    is_of_these = (made.choices[name].rate_gbps or 0.0) > 0.99 * made.rate_gbps
    first = "`tccl doctor` on the machine, then " if doctor_first(made) else "on the machine: "
    basis = "simulated" if made.simulated and not made.dry_run else made.provenance
    if made.pinned_env:
        basis += f", {pinned_env_text(made.pinned_env)}"
    count = len(notices(made))
    noted = f", with {spell(count, 'note')}" if count else ""
    verified = made.winner is not None and made.jobs_ran
    following = f"tccl install {output}" if verified else f"tccl verify {output}"
    texts = assumptions(made)[: made.simulated]
    assumed = "".join(f"; assumed: {text.partition(' (')[0]}" for text in texts)
    lines = (
        ("Plan", f"{planned_gpus(made)}: {basis}"),
        ("Verdict", advice(made)),
        ("Rates", ", ".join(rates).replace("nan GB/s", "no rate")),
        ("Limit", limits[0] if limits else limit * is_of_these),
        ("How sure", subject.say_sure(made) + assumed + "; cut short" * made.cut_short),
        ("Files", f"in {output}; all of it{noted}: tccl show {output}"),
        ("Next", f"{first * (made.simulated or made.dry_run)}{following}"),
    )
    for title, text in filter(lambda line: line[1], lines):
        style = GOOD if title == "Verdict" and not made.dry_run else ""
        console.print(grid([(title.ljust(9), text)]), style=style)


def _write(made: Plan, output: Path, subject: Subject) -> None:
    with defer_signals():
        write_plan(
            made,
            output,
            models=subject.models(made),
            fingerprint=subject.fingerprint,
            tables={} if made.cancelled else subject.table_files(),
        )
        if subject.links is not None:
            ProvenLinks(proof=subject.links).keep(output)


def _prove_for(request: PlanRequest, job: Job | None, known: Path | None) -> Prove | None:
    """Return what proves the links where GPUs of this host are planned, beside a plan's files."""
    by_model = request.simulate is not None or request.backend == "host"
    if job is None and not request.names_hosts and not by_model:
        measured = known is not None and holds_measurements(known / JOURNAL_FILE)
        return prove_into([], force=request.prove, gpus=request.gpus, measured=measured)
    # The hosts of a job prove their links when they are opened.
    if request.prove and (job is None or by_model):
        raise InputError("--prove", "is for GPUs that are measured", "leave it out")
    return None


def proven_host(
    *,
    force: bool = False,
    gpus: str | None = None,
    plans: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> ProvenHost:
    """Return this host with a proof of its links, after a line that says what runs.

    `ready` is called when processes that measure may start.

    Raises InputError: what `plans` are for NCCL that fails here whatever the links.
    """
    from tccl_py.health.proving import prove_host  # noqa: PLC0415 (loads much)

    chosen = None if gpus is None else parse_gpus(gpus, "`gpus`")
    with interrupts_put_off(CTRL_C_AND_SIGTERM):
        proven = prove_host(chosen, force=force, plans=plans, say=notice, ready=ready)
    links = proven.links
    if plans and links is not None:
        if links.verdict == "host memory fails":
            right = "; ".join((*links.causes, "`tccl doctor` has more")[:2])
            raise InputError("NCCL here", f"fails {links.what}", right)
        if links.verdict != "sound":
            notice(f"links: {links.verdict}: {links.what}")
    return proven


def prove_into(
    hosts: list[ProvenHost],
    *,
    force: bool = False,
    gpus: str | None = None,
    measured: bool = False,
) -> Prove:
    """Return what proves the links for a plan, and adds this host to `hosts`.

    Where sets were `measured` before, others need not be, and no process starts for them.
    """

    def prove(ready: Callable[[], None]) -> tuple[Proof | None, Sequence[AskedJob]]:
        early = {} if measured else {"ready": ready}
        hosts.append(proven_host(force=force, gpus=gpus, plans=True, **early))
        return hosts[-1].links, hosts[-1].jobs

    return prove


def plan_by_workload(
    made: Plan, workload: Callable[[int], Workload], model: MachineModel | None
) -> tuple[Plan, Communication | None, str]:
    """Return a plan that recommends what is predicted to be best for a job, and what that is."""
    from tccl_py.experiments.prediction import predicted_communication  # noqa: PLC0415 (slow)
    from tccl_py.report.tables import communication_line  # noqa: PLC0415
    from tccl_py.simulator.source import Simulator  # noqa: PLC0415

    source = None if model is None else Simulator(model)
    try:
        job = workload(len(made.orders[0]))
        predicted = predicted_communication(made, job, source)
    except InputError as error:
        predicted, line = None, str(error)
    else:
        # Any doubt is default NCCL.
        made = replace(made, winner="default" if predicted is None else predicted.chosen)
        nothing = "nothing of your job's communication can be predicted"
        line = nothing if predicted is None else communication_line(predicted)
        line += "; `tccl verify DIR --workload` times it"
    return replace(made, notices=(*made.notices, line)), predicted, line


def until_jobs_decide(made: Plan) -> Plan:
    """Return a host's plan that recommends default NCCL until jobs show what harms no row.

    Where that fails it is the smallest choice that runs. What is fastest for large all-reduces may
    slow small messages, send/recv and all-to-all, and no rule tells how much. A model's plan, which
    no job here can judge, recommends what it predicts.
    """
    if made.winner is not None or made.simulated or made.dry_run or not files_of(made).for_all_jobs:
        return made
    default = replace(made, winner="default")
    if made.recommended != default.recommended:
        least = choice_words(default.recommended, default.job_settings)
        names = {"large-buffers", made.recommended} - {default.recommended}
        ways = made.choices.items()
        words = (choice_words(name, way.settings) for name, way in ways if name in names)
        notice(
            f"{least} is recommended until jobs have run: `tccl verify DIR` tells whether "
            f"{' or '.join(words)} loses in any row, and else makes it the plan's choice"
        )
    return default


def _budget(
    backend: str | None, max_sets: int | None, max_seconds: float | None, *, here: bool
) -> Budget:
    usual = _DRY_SETS if backend == "host" else HOST_SETS if here else _SETS
    most = usual if max_sets is None else max_sets
    check_range("--max-sets", most, 1, 1e9)
    if max_seconds is not None:
        check_range("--max-seconds", max_seconds, 0, 1e9, above=True)
    return replace(DEFAULT_BUDGET, sets=most, seconds=max_seconds)


def _check(request: PlanRequest, *, in_job: bool, tune: bool | None) -> None:
    """Refuse options that contradict each other."""
    options.check_job({"--interfaces": request.interfaces}, in_job=in_job)
    gid_index = request.ib_gid_index
    check_range("--gid-index", gid_index or 0, 0, MAX_GID_INDEX)
    check_range("--seed", request.seed or 0, 0, inf)
    simulate = "--simulate MACHINE " * (request.simulate is None)
    models = f"add {simulate}--nodes N, or {UNDER_MPI}"
    if in_job or request.names_hosts:
        right = "leave it out: as many GPUs of a host are used as it has ranks (slots)"
        refuse({"--gpus": request.gpus}, "is about one machine", right)
    else:
        listed = {"--hosts": request.hosts, "--switches": request.switches}
        order = {"--keep-order": request.keep_order, "--gid-index": gid_index}
        listed["--gpus-per-job"] = None if request.subsets else request.gpus_per_job
        refuse({**listed, **order}, "is about several nodes", models)
    if in_job:
        by_models = {"--simulate": request.simulate, "--nodes": request.nodes}
        refuse(by_models, "needs no ranks", "start the command without mpirun or srun")
    elif request.names_hosts:
        right = f"leave it out, or measure them: {UNDER_MPI}"
        refuse({"--tune": tune}, "runs collectives on the hosts", right)
        if request.simulate is None:
            refuse({"--nodes": request.nodes}, "is about models", models)


def _check_tuning(job: Job | None = None) -> None:
    from tccl_py.experiments.plans import check_tuning  # noqa: PLC0415 (slow)

    check_tuning(job)


def _tune(
    made: Plan, output: Path, hosts: Bench | None, job: Job | None, tune: bool | None
) -> Plan:
    """Verify and tune a written plan if asked; between sockets jobs alone tell the bandwidth."""
    if job is None:
        return _tuned_now(output) if tune else made
    from tccl_py.sources.hosts import HostsSource  # noqa: PLC0415 (under MPI alone)

    assert isinstance(hosts, HostsSource)
    if tune is None and not hosts.dry_run and made.settings.socket_ifname:
        try:
            absent = sorted(set(made.cluster.names) - {host.name for host in hosts.session.hosts})
            if absent:
                raise InputError(f"host {absent[0]}", "is not in this job", "verify all hosts")
            _check_tuning(job)
            tune = True
        except InputError as error:
            notice(f"predicted bandwidth over sockets may be too high: no job checked it ({error})")
    if not tune:
        return made
    hosts.session.end_workers()
    return _tuned_now(output, job, "host" if hosts.dry_run else "cuda")


def _tuned_now(output: Path, job: Job | None = None, backend: Backend = "cuda") -> Plan:
    from tccl_py.cli.verify import tuned_plan  # noqa: PLC0415 (slow)

    return tuned_plan(output, job, backend)


@contextmanager
def _planning(journal: Path, output: Path) -> Iterator[None]:
    """Explain the end of a search without a plan, by SIGTERM or an early Ctrl-C as well."""
    try:
        with interrupts_put_off(CTRL_C_AND_SIGTERM):
            yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, Terminated)):
            notice("interrupted before there was a plan: none was written")
        if holds_measurements(journal):
            notice(f"measurements are kept: the same command resumes from {output}")
        raise
