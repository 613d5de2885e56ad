"""Plans for the hosts of an MPI job, over a stand-in for the job's hosts that knows their rates."""

from types import SimpleNamespace

import msgspec
import pytest

from tccl_profiler.cluster.facts import Interface
from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.cluster import Cable
from tccl_py.model.links import LinkFact, Proof
from tccl_py.model.machine import Knowledge
from tccl_py.model.measurement import NIC_TRANSPORTS, Measurement
from tccl_py.nccl.view import view
from tccl_py.plan.chains import FailingPair
from tccl_py.plan.directory import write_plan
from tccl_py.planning.opening_hosts import (
    HostsRequest,
    cluster_of_job,
    cluster_subject,
    plan_job,
    simulated_cluster,
)
from tccl_py.planning.plan_sources import pair_rates
from tccl_py.planning.request import PlanRequest
from tccl_py.readers.sysfs import Neighbour
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.sources.bench import Bench
from tests.cluster_plans import FOUR
from tests.cluster_plans import PAIR as MACHINE
from tests.faulty_links import links_of

GBPS, SLOW_GBPS = 20.0, 4.0
RACK = ("h0", "h1")
"""Hosts of one rack; all others are in another."""
REQUEST = PlanRequest(ring_counts=(1,), budget=Budget(sets=6, idle_sets=2))


class Network:
    """Flows have one rate, but over the NICs of slow hosts, and between racks."""

    simulated = False

    def __init__(self, slow=(), across=GBPS, together=True):
        self.slow, self.across, self.together = slow, across, together
        self.sets = []

    def measure(self, sets):
        for one in sets:
            hosts = {name for flow in one.flows for name in flow.hosts}
            if not self.together and len(hosts) > 2:
                raise MeasurementError("a host did not answer")
        self.sets += sets
        return [
            Measurement(
                transfers=one,
                samples_gbps=tuple((self._gbps(flow),) * 3 for flow in one.flows),
                simulated=False,
                overlap=1.0,
            )
            for one in sets
        ]

    def _gbps(self, flow):
        if not flow.is_network:
            return GBPS
        crosses = len({name in RACK for name in flow.hosts}) == 2
        slow = SLOW_GBPS if set(flow.hosts) & set(self.slow) else GBPS
        return min(slow, self.across) if crosses else slow


class Hosts(Bench):
    """Stands for the source over a job's hosts, each with two ranks."""

    conditions = ""

    def __init__(self, *names, network="nccl", machine=MACHINE, proofs=None, **rates):
        self.network = Network(**rates)
        super().__init__(self.network)
        nics = machine.nics
        hosts = [
            SimpleNamespace(
                name=name,
                machine=machine,
                knowledge=Knowledge(peer_access_default=True),
                ranks=(2 * number, 2 * number + 1),
                addresses={
                    nic.index: Interface(name=nic.name, address="", up=True) for nic in nics
                },
            )
            for number, name in enumerate(names)
        ]
        self.session = SimpleNamespace(
            hosts=hosts, transport=NIC_TRANSPORTS[network], proofs=lambda force: proofs
        )

    def summary(self, _):
        return ("by a stand-in",)


def planned(source, switches=None, **task):
    told = []
    growth = HostsRequest(REQUEST, **task)
    plan = plan_job(source, cluster_of_job(source, switches), growth, say=told.append)
    return plan, told


def test_cables_of_two_hosts_are_those_that_lldp_tells():
    source = Hosts("h0", "h1")
    first, second = source.session.hosts
    for host, near, other, far in ((first, 0, second, 1), (second, 1, first, 0)):
        heard = (Neighbour(system=other.name, port=other.addresses[far].name),)
        host.addresses[near] = msgspec.structs.replace(host.addresses[near], heard=heard)
    assert cluster_of_job(source, None).cables == (Cable.between("h0", [0], "h1", [1]),)


def test_equal_hosts_have_one_class_and_their_whole_ring_is_measured():
    source = Hosts("h0", "h1", "h2")
    plan, told = planned(source)
    assert told == [] and len(plan.cluster.classes) == 1
    assert plan.class_gpus == ((0, 1),)
    assert plan.rate_gbps == plan.whole_ring_gbps == pytest.approx(GBPS * plan.ring_count)
    assert "by a stand-in" in plan.notices
    assert plan.sets_measured == len(source.network.sets)
    # The last set has flows of all hosts.
    assert {name for flow in source.network.sets[-1].flows for name in flow.hosts} == {
        "h0",
        "h1",
        "h2",
    }


def test_a_host_with_slower_nics_is_named_and_gets_a_class_of_its_own():
    plan, told = planned(Hosts("h0", "h1", "h2", "h3", slow=("h2",)))
    assert any(text.startswith("host h2: ") for text in told)
    classes = plan.cluster.host_classes
    alone = [name for name, number in classes.items() if number == classes["h2"]]
    assert alone == ["h2"]
    # The ring goes through all hosts.
    assert plan.rate_gbps == pytest.approx(SLOW_GBPS * plan.ring_count)


@pytest.fixture
def switches(tmp_path):
    path = tmp_path / "switches.yaml"
    path.write_text("switches:\n  - {name: a, hosts: [h0, h1]}\n  - {name: b, hosts: [h2, h3]}\n")
    return path


def test_uplinks_of_named_switches_are_known_from_the_pairs_measured(switches):
    source = Hosts("h0", "h1", "h2", "h3", across=SLOW_GBPS)
    plan, told = planned(source, switches)
    tree = plan.cluster.switches
    uplinks = {switch.name: switch.uplink_gbps for switch in tree.all_switches}
    assert uplinks["a"] == uplinks["b"] == pytest.approx(SLOW_GBPS)
    assert sum("the uplink of switch" in text for text in told) == 2


@pytest.mark.parametrize(
    ("network", "out", "into"),
    [
        ("tcp", "h0.C0->h0.N0->h2.N0", "h2.N0->h2.N0->h2.C0"),
        ("nccl", "h0.G0->h0.G0->h0.C0->h0.N0->h2.N0", "h2.N0->h2.N0->h2.C0->h2.G0->h2.G0"),
    ],
)
def test_pairs_send_from_host_memory_or_by_nccl_from_the_gpu_beside_the_nic(
    network, out, into, switches
):
    source = Hosts("h0", "h1", "h2", "h3", network=network)
    cluster = cluster_of_job(source, switches)
    found = pair_rates(source, cluster, NIC_TRANSPORTS[network])
    pairs = [("h0", "h1"), ("h0", "h2"), ("h2", "h0"), ("h2", "h3")]
    assert sorted(found) == [(*pair, GBPS) for pair in pairs]
    across = f"{out}{into.removeprefix('h2.N0')}{{blocks=4,fifo=512K}}"
    assert across in [str(one) for one in source.network.sets]


def test_rings_that_cannot_be_measured_at_once_leave_a_notice():
    plan, _ = planned(Hosts("h0", "h1", "h2", together=False))
    assert plan.whole_ring_gbps is None
    assert any("could not be measured all at once" in notice for notice in plan.notices)
    assert any("GPU Direct RDMA): not proven" in notice for notice in plan.notices)


# Hosts that proved their links

SOUND = Proof(verdict="sound")
HANGS = Proof(
    verdict="hangs",
    common="GPU 1",
    what="nothing that GPU 1 writes arrives",
    facts=tuple(
        LinkFact(one=min(1, n), other=max(1, n), state="broken", verdict="hangs", what="nothing")
        for n in (0, 2, 3)
    ),
)
BUSY = Proof(verdict="inconclusive", what="GPU 0 is in use")


def subject_with(proofs, monkeypatch, directory=None, **request):
    """What is planned for over four GPUs a host, with these proofs; and what was said."""
    source, told = Hosts(*proofs, machine=FOUR, proofs=proofs), []
    monkeypatch.setattr("tccl_py.planning.opening_hosts.open_hosts", lambda *_, **__: source)
    request = msgspec.structs.replace(REQUEST, version="2.28", **request)
    job, stack = SimpleNamespace(hosts=proofs), SimpleNamespace(enter_context=lambda o: o)
    subject = cluster_subject(request, job, stack, told.append, directory)
    return subject, told


def test_a_host_with_broken_links_is_named_and_no_host_is_planned_over_such(monkeypatch):
    proofs = {"h0": SOUND, "h1": SOUND, "h2": HANGS, "h3": BUSY}
    subject, told = subject_with(proofs, monkeypatch)
    plan = subject.search()
    classes = plan.cluster.host_classes
    assert classes["h0"] == classes["h1"] == classes["h3"] != classes["h2"]
    broken = "host h2: links: hangs (GPU 1): nothing that GPU 1 writes arrives; "
    assert f"{broken}all hosts run without this P2P, unless it is left out" in plan.notices
    assert "host h3: links: not proven: GPU 0 is in use" in plan.notices
    assert set(told) >= set(plan.notices[:2])
    assert plan.choices["default"].fails.verdict == "hangs"
    assert FailingPair("h2 GPU 0", "h2 GPU 1") in plan.choices["default"].fails.pairs
    assert plan.recommended != "default"
    for name in {plan.recommended, "variables"}:
        settings = plan.choices[name].settings
        for kind in plan.cluster.classes:
            assert not view(kind.machine, kind.knowledge, settings).unsound
    flows = {flow for one in subject.source.network.sets for flow in one.flows}
    over = {link for flow in flows if "h2" in flow.hosts for link in links_of(flow)}
    assert over.isdisjoint((fact.one, fact.other) for fact in HANGS.facts)


def test_hosts_with_the_same_broken_links_are_one_class_whatever_was_seen(monkeypatch):
    facts = tuple(msgspec.structs.replace(fact, what="something else") for fact in HANGS.facts)
    proofs = {"h0": HANGS, "h1": HANGS, "h2": msgspec.structs.replace(HANGS, facts=facts)}
    subject, told = subject_with(proofs, monkeypatch)
    assert len(subject.search().cluster.classes) == 1
    (named,) = [text for text in told if text.startswith("host h")]
    assert named.startswith("host h[0-2]: links: hangs")
    assert named.endswith("all hosts run without this P2P")


def test_a_host_where_nccl_fails_without_p2p_too_ends_the_planning_by_name(monkeypatch):
    causes = ("/dev/shm holds 64 MB: docker run --shm-size=1g",)
    fails = Proof(verdict="host memory fails", what="No space left on device", causes=causes)
    with pytest.raises(InputError, match=r"NCCL on host h1: .*No space.*leave it out; /dev/"):
        subject_with({"h0": SOUND, "h1": fails}, monkeypatch)


def test_hosts_of_a_job_join_the_plan_of_the_directory_whose_hosts_need_not_run(
    monkeypatch, tmp_path
):
    def planned_into(*hosts, **request):
        asked = {"backend": "host", "directory": tmp_path, **request}
        subject, _ = subject_with(dict.fromkeys(hosts, SOUND), monkeypatch, **asked)
        made = subject.search()
        write_plan(made, tmp_path, tables=subject.table_files())
        flows = {flow for one in subject.source.network.sets for flow in one.flows}
        return made, {host for flow in flows for host in flow.hosts}

    first, _ = planned_into("h0", "h1")
    whole, measured = planned_into("h1", "h2")
    assert whole.cluster.names == ("h0", "h1", "h2") and len(whole.cluster.classes) == 1
    assert measured == {"h1", "h2"} and whole.sets_measured < first.sets_measured
    with pytest.raises(InputError, match="already holds a plan of these hosts"):
        planned_into("h0", "h2")
    # A list names the whole set.
    fewer, _ = planned_into("h2", "h3", hosts="h1,h2,h3")
    assert fewer.cluster.names == ("h1", "h2", "h3")


def test_hosts_of_memory_are_not_asked_for_a_proof(monkeypatch):
    subject, told = subject_with({"h0": HANGS, "h1": SOUND}, monkeypatch, backend="host")
    assert told == [] and not any("links" in text for text in subject.search().notices)


def test_simulated_nodes_are_counted_or_listed_and_not_two_different_numbers(tmp_path):
    (tmp_path / "hosts").write_text("gpu1\ngpu2\ngpu3\n")
    model = load_bundled("nvswitch-8gpu-8nic")
    assert simulated_cluster(model, 2, None, None).names == ("node1", "node2")
    for hosts in (str(tmp_path / "hosts"), "gpu[1-3]", "gpu1,gpu2,gpu3"):
        assert simulated_cluster(model, 3, hosts, None).names == ("gpu1", "gpu2", "gpu3")
    for nodes, hosts in ((2, "gpu[1-3]"), (0, None), (None, None)):
        with pytest.raises(InputError) as caught:
            simulated_cluster(model, nodes, hosts, None)
        assert caught.value.where == "`nodes`"
