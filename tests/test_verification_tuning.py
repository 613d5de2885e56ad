"""Tuning a cluster's plan: what is tried on its hosts, what wins, and what is written."""

import contextlib
import itertools
import json
import os
import re
import signal
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from tccl_py.cli import verify
from tccl_py.errors import InputError, SourceLostError, Terminated
from tccl_py.experiments import plans
from tccl_py.experiments.comparison import RunBudget
from tccl_py.experiments.record import Verification
from tccl_py.experiments.spec import SIZES
from tccl_py.experiments.target import read_target, target_of
from tccl_py.experiments.verify import run_tuning, verify_target
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.validator import NodeJob, validate_cluster
from tccl_py.plan.directory import nccl_files, write_plan
from tccl_py.plan.host_files import host_graphs
from tccl_py.plan.load import check_plan
from tccl_py.plan.retuning import gdr_variants, keeps_rings, retune
from tccl_py.plan.staging import lock_directory
from tccl_py.plan.text import summary
from tccl_py.planning.handle import load_plan
from tccl_py.simulator.descriptions import model_for, read_description
from tests.cluster_plans import LOCAL, NOTHING, PAIR, cluster_plan, equal_hosts, mixed
from tests.commands import tccl
from tests.planned import replace_plan
from tests.processes import children
from tests.profiler_clusters import agents_in_processes
from tests.test_verification_hosts import FakeHosts, place_of

EFFORT = RunBudget(sizes=(16 << 10, 64 << 20), checks=False)


def told(task):
    """The settings that a host's ranks have: channels of its file, and variables."""
    (text,) = task.files.values()
    channels = int(re.search(r'nchannels="(\d+)"', text)[1])
    variables = {name: one for name, one in task.environment.items() if name.startswith("NCCL_")}
    return channels, int(variables.get("NCCL_BUFFSIZE", 4 << 20)), variables


def by_settings(rate):
    """Seconds: default NCCL's, over what `rate(size, channels, buffsize, variables)` says."""

    def seconds(size, task):
        stock = 1e-4 + size / 1e9
        return stock / rate(size, *told(task)) if task.files else stock

    return seconds


def tuned(plan, hosts, directory, effort=EFFORT, lasted=None):
    """What tuning a plan comes to, written and verified before, as if that had `lasted`."""
    write_plan(plan, directory)
    target = read_target(plan, directory)
    place = place_of(plan, hosts)
    first = verify_target(target, place, effort)
    if lasted is not None:
        first = replace(first, seconds=lasted)
    return run_tuning(target, place, effort, first)


def texts_below(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def best_of_all(size, channels, buffsize, variables):
    """8 channels of 512 KiB, and Ring on top."""
    rate = 1.1 + 0.3 * (channels == 8) + 0.2 * (buffsize == 512 << 10)
    return rate * (1.2 if variables.get("NCCL_ALGO") == "Ring" else 1.0)


def test_the_best_settings_of_all_hosts_are_found_by_their_collectives(tmp_path):
    plan, hosts = mixed(), FakeHosts(seconds=by_settings(best_of_all))
    found = tuned(plan, hosts, tmp_path)
    chosen = found[0].choices["graph"]
    # Nothing that makes no difference is chosen.
    changes = {"channels": 8, "buffsize": 512 << 10, "algo": "Ring"}
    assert chosen == replace(plan.settings, **changes)
    assert found[1].judged.settings == chosen
    assert found[1].accepted
    assert found[1].hosts == plan.host_order
    # What was achieved is the plan's rate now, over the 11 ranks of the hosts.
    stock = 2 * 10 / 11 * (64 << 20) / (1e-4 + (64 << 20) / 1e9) / 1e9
    assert found[0].plan.choices["graph"].achieved_gbps == pytest.approx(
        stock * 1.6 * 1.2, rel=0.01
    )
    # So is default NCCL's, or the gain would be one of two scales.
    assert found[0].plan.choices["default"].achieved_gbps == pytest.approx(stock, rel=0.01)
    # Default NCCL first, then the choices as they are; channels before all else.
    first, second, third, *others = found[1].tried
    assert [first.name, second.name, third.settings] == ["default", "variables", plan.settings]
    graphs = [one.settings.channels for one in others if one.name == "graph"]
    assert graphs[:4] == [8, 8, 4, 4]


def test_every_host_of_a_job_has_one_choice_of_settings(tmp_path):
    plan, hosts = mixed(), FakeHosts(seconds=by_settings(best_of_all))
    tuned(plan, hosts, tmp_path)
    jobs = [job for job in hosts.tasks if any(task.files for task in job.values())]
    assert len(jobs) > 10
    for job in jobs:
        assert len({told(task)[:2] for task in job.values()}) == 1
        assert set(job) == set(plan.host_order)
    # Each still has its own chains.
    assert len({task.files["graph.xml"] for task in jobs[-1].values()}) == 3


def test_rings_get_equal_numbers_of_channels_in_all_that_is_tried(tmp_path):
    plan, hosts = equal_hosts(3), FakeHosts()
    found = tuned(plan, hosts, tmp_path)
    (rings,) = {len(passage.chains) for passage in plan.paths}
    assert rings == 2
    counts = {one.settings.channels for one in found[1].tried if one.name == "graph"}
    assert counts == {2, 4, 8, 16, 32}


def test_where_no_settings_of_graph_files_are_faster_default_nccl_is_recommended(tmp_path):
    plan, hosts = mixed(), FakeHosts(seconds=by_settings(lambda *_: 0.95))
    found = tuned(plan, hosts, tmp_path)
    assert found[0].plan.settings == plan.settings
    assert found[0].plan.recommended == found[1].chosen == "default"
    assert len(found[1].tried) > 10


def by_sockets(size, task):
    """Seconds of a job: two socket threads make large messages twice as fast."""
    threads = int(task.environment.get("NCCL_SOCKET_NTHREADS", 1))
    return 1e-4 + size / 1e9 / (2.0 if threads == 2 else 1.0)


def test_over_sockets_threads_of_connections_are_tried_and_need_no_graph_file(tmp_path):
    plan = equal_hosts(3)
    settings = replace(plan.settings, socket_ifname=("eth0",), ib_hca=())
    over_sockets = replace_plan(plan, settings=settings)
    found = tuned(over_sockets, FakeHosts(seconds=by_sockets), tmp_path)
    assert found[0].plan.recommended == "variables"
    chosen = found[0].plan.choices["variables"].settings
    assert (chosen.socket_threads, chosen.sockets_per_thread) == (2, 2)
    assert found[0].plan.gain("variables") == pytest.approx(2.0, rel=0.05)


def test_socket_threads_that_cost_small_messages_are_offered_and_not_recommended(tmp_path):
    def seconds(size, task):
        threaded = "NCCL_SOCKET_NTHREADS" in task.environment
        # Waking a thread costs a fifth of a small message's time.
        return by_sockets(size, task) + (2e-5 if threaded else 0.0)

    plan = equal_hosts(3)
    settings = replace(plan.settings, socket_ifname=("eth0",), ib_hca=())
    over_sockets = replace_plan(plan, settings=settings)
    target = tuned(over_sockets, FakeHosts(seconds=seconds), tmp_path)[0]
    target.write()
    found = load_plan(tmp_path)
    assert found.recommended == "default"
    assert found.choices["variables"].settings.socket_threads == 2
    assert found.gain("variables") == pytest.approx(2.0, rel=0.1)
    assert "16 KiB" in found.choices["variables"].note


def test_settings_that_are_slow_for_small_messages_are_left_out(tmp_path):
    def rate(size, channels, buffsize, variables):
        if channels == 8:
            return 2.0 if size > 1 << 20 else 0.8
        return 1.3 if channels == 16 else 1.1

    found = tuned(mixed(), FakeHosts(seconds=by_settings(rate)), tmp_path)
    assert found[0].choices["graph"].channels == 16


@pytest.mark.parametrize(("lasted", "channels"), [(None, 16), (480.0, 2)])
def test_the_next_best_settings_are_taken_where_pairs_say_that_the_best_harm_a_size(
    tmp_path, lasted, channels
):
    def rate(size, channels, buffsize, variables):
        if channels == 8:
            # Too little for a single job to tell.
            return 2.0 if size > 1 << 20 else 0.95
        return 1.3 if channels == 16 else 1.1

    found = tuned(mixed(), FakeHosts(seconds=by_settings(rate)), tmp_path, lasted=lasted)
    # After eight minutes no further choice is compared, and the plan stays.
    assert found[0].choices["graph"].channels == channels


def test_settings_that_fail_on_a_host_are_told_by_its_name_and_left_out(tmp_path):
    def fails(task):
        return bool(task.files) and told(task)[0] == 8

    hosts = FakeHosts(seconds=by_settings(best_of_all), fails=fails)
    found = tuned(mixed(), hosts, tmp_path)
    failed = [one for one in found[1].tried if one.failed]
    assert {one.settings.channels for one in failed} == {8}
    assert {one.failed for one in failed} == {"host gpu2: rank 4: ended with code 1; no room"}
    assert (found[0].choices["graph"].channels, found[0].choices["graph"].algo) != (8, None)


def test_choices_that_fail_together_are_tried_one_by_one(tmp_path):
    class Full(FakeHosts):
        """Has room for two jobs at once."""

        def run(self, tasks):
            self._fails = lambda task: len(tasks["gpu1"]) > 2
            return super().run(tasks)

    hosts = Full(seconds=by_settings(best_of_all))
    found = tuned(mixed(), hosts, tmp_path)
    assert (found[0].choices["graph"].channels, found[0].choices["graph"].algo) == (8, "Ring")
    assert not any(one.failed for one in found[1].tried)


def test_the_directory_is_written_whole_for_the_tuned_settings(tmp_path):
    plan = mixed()
    models = {one.name: model_for(one.machine, one.knowledge) for one in plan.cluster.classes}
    write_plan(plan, tmp_path, models=models)
    before = texts_below(tmp_path)
    target = read_target(plan, tmp_path)
    hosts = FakeHosts(seconds=by_settings(best_of_all))
    found = plans.run(target, place_of(plan, hosts), EFFORT, tune=True)
    after = load_plan(tmp_path)
    assert (after.settings.channels, after.settings.buffsize) == (8, 512 << 10)
    assert after.notices[-1].startswith("settings tuned: ")
    assert (after.orders, after.host_order) == (plan.orders, plan.host_order)
    assert {
        name: texts_below(tmp_path)[f"nccl/{name}"] for name in nccl_files(after, tmp_path)
    } == {name: text.encode() for name, text in nccl_files(after, tmp_path).items()}
    assert "export NCCL_BUFFSIZE=524288" in (tmp_path / "nccl" / "env.sh").read_text()
    assert "NCCL_ALGO=Ring" in (tmp_path / "nccl" / "nccl.conf").read_text()
    # The same files as before, and the machines with their models.
    assert set(texts_below(tmp_path)) == {*before, "verify.json"}
    for one in after.cluster.classes:
        assert (
            read_description(tmp_path / "machines" / f"{one.name}.json").model == models[one.name]
        )
    kept = Verification.load(tmp_path)
    assert kept == found
    assert (kept.judged.settings, len(kept.tried) > 10) == (after.settings, True)
    assert kept.judged.environment["NCCL_GRAPH_FILE"] == f"{tmp_path}/nccl/hosts/HOST.xml"
    assert kept.judged.environment["NCCL_BUFFSIZE"] == "524288"


class Ending(FakeHosts):
    """Hosts of which a job of the tuning does not come back: something else happens."""

    def __init__(self, happens, *, at):
        super().__init__(seconds=by_settings(best_of_all))
        self._happens, self._before = happens, at
        self.tuning = False

    def run(self, tasks):
        if self.tuning:
            self._before -= 1
            if self._before < 0:
                self._happens()
        return super().run(tasks)


def watch_tuning(monkeypatch, hosts):
    """Tells the hosts when tuning begins."""

    def tuning(*arguments, **more):
        hosts.tuning = True
        return run_tuning(*arguments, **more)

    monkeypatch.setattr(plans, "run_tuning", tuning)


def lost():
    raise SourceLostError("host gpu1: has died")


@pytest.mark.parametrize("job", [0, 1, 2, 4, 6, 8])
@pytest.mark.parametrize(
    ("happens", "raised"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), Terminated),
        (lost, SourceLostError),
    ],
)
def test_whatever_ends_tuning_leaves_the_plan_and_what_was_verified_of_it(
    tmp_path, monkeypatch, happens, raised, job
):
    plan = mixed()
    write_plan(plan, tmp_path)
    before = texts_below(tmp_path)
    target = read_target(plan, tmp_path)
    hosts = Ending(happens, at=job)
    watch_tuning(monkeypatch, hosts)
    with pytest.raises(raised):
        plans.run(target, place_of(plan, hosts), EFFORT, tune=True)
    after = texts_below(tmp_path)
    assert Verification.load(tmp_path).judged.settings == plan.settings
    assert {name: text for name, text in after.items() if name != "verify.json"} == before
    assert load_plan(tmp_path) == plan


def judged(plan):
    """What NCCL makes of the plan's files."""
    graphs = host_graphs(plan)
    jobs = []
    for host in plan.hosts:
        number = plan.class_number(host)
        machine = plan.cluster.classes[number].machine
        gpus, graph = plan.class_gpus[number], graphs[host.name]
        jobs.append(NodeJob(machine=machine, knowledge=NOTHING, gpus=gpus, graph=graph))
    variables = environment(plan.settings)
    return validate_cluster(jobs, version=plan.settings.version, environment=variables)


def hoppers(rate):
    """Two hosts with GPUs of sm 90, whose two rings carry so much."""
    gpus = tuple(replace(gpu, sm=90) for gpu in PAIR.gpus)
    machine = replace(PAIR, gpus=gpus)
    chains = ((0, (0, 1), 0), (1, (1, 0), 1))
    return cluster_plan(
        [("a", machine), ("b", machine)],
        {"a": chains, "b": chains},
        settings=Settings(channels=8, **LOCAL),
        rate_gbps=rate,
        bound_gbps=None,
    )


@pytest.mark.parametrize("rate", [80.0, 170.0, 200.0, 400.0])
def test_settings_are_tried_only_where_nccl_ends_up_with_their_channels(rate):
    plan = hoppers(rate)
    for channels in (2, 4, 8, 16):
        settings = replace(plan.settings, channels=channels)
        found = judged(replace_plan(plan, settings=settings))
        assert found.verdict == "used"
        assert keeps_rings(plan, settings) == (len(found.rings) == 2 * channels)


@pytest.mark.parametrize("rate", [80.0, 170.0, 200.0, 400.0])
@pytest.mark.parametrize("channels", [2, 4, 8])
def test_channels_that_nccl_would_double_at_the_rate_achieved_are_asked_for(rate, channels):
    plan = hoppers(50.0)
    settings = replace(plan.settings, channels=channels)
    made = check_plan(retune(plan, settings, achieved_gbps=rate), where="plan")
    assert len(judged(made).rings) == 2 * made.settings.channels
    while rate / channels > 45 and channels < 8:
        channels *= 2
    assert made.settings.channels == channels


def test_what_graph_files_over_hosts_achieved_is_kept_and_the_verified_files_stay(tmp_path):
    plan = hoppers(80.0)
    plan = replace_plan(plan, settings=replace(plan.settings, channels=4))
    hosts = FakeHosts(seconds=lambda size, task: (1 if task.files else 2) * (1e-6 + size / 3e11))
    first = target_of(plan, tmp_path)
    found = replace(verify_target(first, place_of(plan, hosts), EFFORT), backend="cuda")
    target = first.settle(found)
    achieved = target.plan.choices["graph"].achieved_gbps
    assert achieved == found.arm("graph").achieved_gbps
    assert target.plan.gain("graph") == pytest.approx(2.0, rel=0.01)
    assert f"{achieved:.2f} achieved, 2.00x default" in dict(summary(target.plan))["graph file"]
    # At this rate in the files NCCL would use twice as many channels.
    assert len(judged(replace_plan(plan, rate_gbps=achieved)).rings) == 2 * len(judged(plan).rings)
    write_plan(target.plan, tmp_path)
    again = read_target(load_plan(tmp_path), tmp_path)
    assert again.arm("graph").predicted_gbps == achieved
    for settled in (again, again.settle(found), again.settle(replace(found, arms=()))):
        assert host_graphs(settled.plan) == host_graphs(plan)
    # Candidates have the predicted rate in their files, by which they are permitted.
    for channels in (4, 8):
        settings = replace(plan.settings, channels=channels)
        tried = again.retune({"graph": settings})
        assert tried.graphs == host_graphs(replace_plan(plan, settings=settings))
        assert again.permits("graph", settings)


@pytest.mark.parametrize("plan", [mixed(), equal_hosts(2), hoppers(80.0)])
def test_rings_of_a_retuned_plan_are_the_same_and_its_parts_fit(plan, tmp_path):
    for channels, size, side in itertools.product(
        (2, 8), (1 << 18, 1 << 22), ("sender", "receiver")
    ):
        settings = replace(plan.settings, channels=channels, buffsize=size, shm_locality=side)
        made = check_plan(retune(plan, settings, achieved_gbps=12.0), where="plan")
        assert (made.orders, made.hosts) == (plan.orders, plan.hosts)
        assert (made.choices["graph"].achieved_gbps, made.bound_gbps, made.whole_ring_gbps) == (
            12.0,
            None,
            None,
        )
        assert judged(made).verdict == "used"
        made.save(tmp_path / "plan.json")
        assert load_plan(tmp_path) == made


def test_landings_are_tried_only_where_bytes_of_the_plans_rings_land_elsewhere():
    plan = hoppers(80.0)
    flows = {hop.flow for chain in plan.paths[0].chains for hop in chain.hops}
    found = gdr_variants(plan, plan.settings)
    assert found
    for one in found:
        fields = {"net_gdr_level": None, "net_gdr_read": None}
        assert replace(one, **fields) == plan.settings
        made = retune(plan, one, achieved_gbps=80.0)
        moved = {hop.flow for chain in made.paths[0].chains for hop in chain.hops}
        assert moved != flows
        assert keeps_rings(plan, one)
    assert len({str(retune(plan, one, achieved_gbps=80.0).paths) for one in found}) == len(found)


class FakeJobs(Ending):
    """The hosts of an MPI job, as the command asks them."""

    hosts = ("login", "gpu1", "gpu2", "gpu3")

    def describe(self, backend, *, interfaces):
        return {name: Facts(name) for name in self.hosts}

    def surroundings(self, *, modules):
        return {name: {"PATH": "/bin"} for name in self.hosts}


class Facts:
    """A host with a NIC for gloo."""

    def __init__(self, name):
        self.name = name
        self.addresses = {0: SimpleNamespace(name="eth0")}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `tccl verify --tune` as the controller of four hosts, whose jobs are stand-ins."""
    write_plan(mixed(), tmp_path)
    monkeypatch.setattr(verify, "in_job", lambda: True)
    monkeypatch.setattr(verify, "controlled_job", lambda: contextlib.nullcontext(object()))

    def run(fake, *options):
        monkeypatch.setattr("tccl_profiler.cluster.agents.RankJobs", lambda job: fake)
        words = ["verify", str(tmp_path), "--backend", "host", "--sizes", "16K,64M", "--tune"]
        return tccl(*words, *options)

    return run


def test_the_command_tunes_the_plan_of_the_jobs_hosts(command, tmp_path):
    told = command(FakeJobs(None, at=0), "--json")
    assert (told.exit_code, told.exception) == (0, None)
    found = json.loads(told.stdout)
    assert (found["hosts"], found["accepted"]) == (["gpu3", "gpu2", "gpu1", "login"], True)
    assert found["arms"][1]["settings"]["buffsize"] == 512 << 10
    words = "graph file, NCCL_NET_DISABLE_INTRA=1, NCCL_BUFFSIZE=524288, NCCL_ALGO=Ring, 8 channels"
    assert f"tccl: tuned: {words}\n" in told.stderr
    assert load_plan(tmp_path).settings.buffsize == 512 << 10
    assert tccl("show", str(tmp_path)).exit_code == 0


def test_a_plan_that_was_just_written_is_tuned_by_its_job(tmp_path, monkeypatch, capsys):
    write_plan(mixed(), tmp_path)
    fake = FakeJobs(None, at=0)
    monkeypatch.setattr("tccl_profiler.cluster.agents.RankJobs", lambda job: fake)
    # Who plans has the directory already.
    with lock_directory(tmp_path):
        made = verify.tuned_plan(tmp_path, object(), "host")
    assert made == load_plan(tmp_path)
    assert made.settings.algo == "Ring"
    # At the plan's 10 GB/s only the largest size takes long.
    assert [one.bytes for one in Verification.load(tmp_path).judged.sizes] == list(SIZES[:-1])
    told = capsys.readouterr()
    assert told.out == ""
    assert "as a DRY RUN over gloo" in told.err


def test_sizes_that_take_a_slow_network_long_are_left_out_where_a_plan_is_tuned(
    tmp_path, monkeypatch
):
    write_plan(mixed(rate_gbps=0.1, bound_gbps=None), tmp_path)
    fake = FakeJobs(None, at=0)
    monkeypatch.setattr("tccl_profiler.cluster.agents.RankJobs", lambda job: fake)
    verify.tuned_plan(tmp_path, object(), "host")
    assert max(one.bytes for one in Verification.load(tmp_path).judged.sizes) == 4 << 20


def test_a_host_that_is_lost_while_settings_are_tried_is_named_and_the_plan_stays(
    command, tmp_path, monkeypatch
):
    before = (tmp_path / "plan.json").read_bytes()
    fake = FakeJobs(lost, at=3)
    watch_tuning(monkeypatch, fake)
    told = command(fake)
    assert (told.exit_code, told.stdout) == (2, "")
    kept, cause = told.stderr.splitlines()
    assert kept.startswith("tccl: not tuned: ")
    assert cause.startswith("tccl: host gpu1: ")
    assert (tmp_path / "plan.json").read_bytes() == before
    assert Verification.load(tmp_path).accepted


def planned(source, cluster, _request, **task):
    """Stands for measuring: workers of the hosts run, and there is a plan."""
    assert source.session.profiler
    assert workers()
    return mixed()


def workers():
    """Those of agents that this process has started."""
    return [pid for agent in children(os.getpid()) for pid in children(agent)]


def test_a_measured_plan_is_tuned_after_its_workers_have_ended(tmp_path, monkeypatch):
    place = tmp_path / "plan"
    words = ["plan", str(place), "--backend", "host", "--devices", "1", "--tune"]
    seen = []

    def tuned(directory, job, backend):
        seen.append((directory, backend, workers()))
        return replace_plan(load_plan(directory), rate_gbps=12.0)

    monkeypatch.setattr("tccl_py.cli.plan.in_job", lambda: True)
    monkeypatch.setattr("tccl_py.planning.opening_hosts.plan_job", planned)
    monkeypatch.setattr("tccl_py.cli.verify.tuned_plan", tuned)
    monkeypatch.setattr("tccl_py.experiments.plans.check_tuning", lambda job: None)
    with agents_in_processes(("h0", "h1")) as job:
        monkeypatch.setattr(
            "tccl_py.cli.measure.controlled_job", lambda: contextlib.nullcontext(job)
        )
        told = tccl(*words, "--interfaces", "lo", "--json")
    assert (told.exit_code, told.exception) == (0, None), told.stderr
    assert seen == [(place, "host", [])]
    assert json.loads(told.stdout)["rate_gbps"] == 12.0


def test_a_host_without_torch_is_named_before_anything_is_planned(tmp_path, monkeypatch):
    class Without:
        def __init__(self, job):
            pass

        def surroundings(self, *, modules):
            raise InputError("host h1", f"lacks {modules[0]}", "install it on all hosts")

    monkeypatch.setattr("tccl_py.cli.plan.in_job", lambda: True)
    monkeypatch.setattr("tccl_profiler.cluster.agents.RankJobs", Without)
    words = ["plan", str(tmp_path / "plan"), "--backend", "host", "--devices", "1"]
    with agents_in_processes(("h0", "h1")) as job:
        monkeypatch.setattr(
            "tccl_py.cli.measure.controlled_job", lambda: contextlib.nullcontext(job)
        )
        told = tccl(*words, "--interfaces", "lo", "--tune")
    assert (told.exit_code, told.stdout) == (2, "")
    assert "host h1: lacks torch" in told.stderr
    assert not (tmp_path / "plan").exists()
