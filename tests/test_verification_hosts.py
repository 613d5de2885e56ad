"""Verifying a cluster's plan: what each host's ranks are told, and what NCCL's log then shows."""

import json
import math
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from msgspec.structs import replace

from tccl_py.errors import InputError, MeasurementError
from tccl_py.experiments.comparison import RunBudget
from tccl_py.experiments.jobs import THIS_HOST, HostRanks, Launcher
from tccl_py.experiments.plans import check_hosts
from tccl_py.experiments.record import Verification
from tccl_py.experiments.spec import JobResult, JobSpec, batches, rows_of
from tccl_py.experiments.target import target_of
from tccl_py.experiments.verify import verify_target
from tccl_py.files import decode_json, encode_json
from tccl_py.nccl.communicators import same_rings
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.validator import NodeJob, validate_cluster
from tccl_py.plan.directory import write_plan
from tccl_py.plan.host_files import host_graphs
from tccl_py.rank_processes.rank import Rendezvous
from tccl_py.rank_processes.tasks import RankOutput
from tccl_py.readers.nccl_topology import read_nccl_topology
from tccl_py.report.verification import facts_of
from tccl_py.workloads.workload import Workload, WorkloadRow
from tests.cluster_plans import NOTHING, cluster_plan, mixed
from tests.nccl_cases import torn
from tests.planned import SMALL, plan_of, replace_plan
from tests.test_nccl_clusters import H200
from tests.verified import rings_in_log


def graphs_of(plan):
    return host_graphs(plan)


def recorded_plan():
    """The plan of the two nodes of one H200 each of which there are logs."""
    machines = [read_nccl_topology(H200 / f"topology{rank}.xml") for rank in range(2)]
    return cluster_plan(
        [("n0", machines[0]), ("n1", machines[1])],
        {f"n{gpu}": ((0, (gpu,), 0), (1, (gpu,), 1)) for gpu in range(2)},
        settings=Settings(version="2.28", channels=2, net_disable_intra=True),
    )


def recorded(name="stock.log"):
    return (H200 / name).read_text()


def test_nccls_own_log_of_two_nodes_without_files_differs_by_nics_alone():
    plan = recorded_plan()
    found = rings_in_log(plan, graphs_of(plan), recorded(), environment(plan.settings))
    assert found.found == found.expected == ((0, 1),) * 4
    # Default NCCL swaps the NICs of the second node, and the plan does not.
    assert found.differences == (
        "channel 0, rank 0 -> 1: by N0 and N1, planned was from N0 to N0",
        "channel 0, rank 1 -> 0: by N0 and N1, planned was from N0 to N0",
        "channel 1, rank 0 -> 1: by N0 and N1, planned was from N1 to N1",
        "channel 1, rank 1 -> 0: by N0 and N1, planned was from N1 to N1",
        "channel 2, rank 0 -> 1: by N0 and N1, planned was from N0 to N0",
        "and 3 more connections by other NICs",
    )
    assert {(link.source, link.target, link.via) for link in found.links} == {
        (0, 1, "NET/Socket/0"),
        (0, 1, "NET/Socket/1"),
        (1, 0, "NET/Socket/0"),
        (1, 0, "NET/Socket/1"),
    }


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("/04 : 0 1", "/04 : 0", "NCCL's log shows no rings over all GPUs"),
        (
            "0[0] -> 1[1] [send] via NET/Socket/0",
            "0[0] -> 1[1] [send] via SHM/direct",
            "rank 0 -> 1 (n0, n1) goes by SHM/direct on 2 channel(s), planned was NET",
        ),
        (
            "via NET/Socket/1",
            "via NET/Socket/7",
            "channel 0, rank 0 -> 1: by N0 and N7, planned was from N0 to N0",
        ),
        (
            "1[1] -> 0[0]",
            "1[1] -> 9[9]",
            "NCCL's log does not say how it connects ranks 1 -> 0",
        ),
    ],
)
def test_what_the_log_shows_otherwise_is_told(old, new, said):
    plan = recorded_plan()
    text = recorded()
    assert old in text
    found = rings_in_log(plan, graphs_of(plan), text.replace(old, new), environment(plan.settings))
    assert not found.same
    assert said in found.differences


@given(torn((H200 / "stock.log").read_bytes()))
@hypothesis_settings(max_examples=30)
def test_no_torn_log_of_several_hosts_fails(text):
    plan = recorded_plan()
    found = rings_in_log(plan, graphs_of(plan), text, environment(plan.settings))
    assert found.same or found.differences
    assert all(set(ring) == {0, 1} for ring in found.found)


def test_files_that_nccl_does_not_take_as_they_stand_are_told_and_nothing_else():
    plan = recorded_plan()
    files = {f"n{rank}": (H200 / f"other-exit{rank}.xml").read_text() for rank in range(2)}
    found = rings_in_log(plan, files, recorded("other-exit.log"), environment(plan.settings))
    # Rings, transports and NICs of NCCL's log are what its own rules make of these files.
    (said,) = found.differences
    assert said.startswith("NCCL does not use the plan's files as they stand: ")


def log_of(plan, graphs):
    """What NCCL would log of these files by our own emulation, in its form."""
    nodes = []
    for host in plan.hosts:
        number = plan.class_number(host)
        machine = plan.cluster.classes[number].machine
        gpus, graph = plan.class_gpus[number], graphs[host.name]
        nodes.append(NodeJob(machine=machine, knowledge=NOTHING, gpus=gpus, graph=graph))
    judged = validate_cluster(
        nodes, version=plan.settings.version, environment=environment(plan.settings)
    )
    seats = [at for at, node in enumerate(nodes) for _ in node.gpus]
    head = "vm:1:1 [0] NCCL INFO "
    count = len(judged.rings)
    lines = [f"{head}NCCL version {plan.settings.version}.7+cuda13.0"]
    for channel, ring in enumerate(judged.rings):
        lines.append(f"{head}Channel {channel:02d}/{count:02d} : {' '.join(map(str, ring))}")
    for channel, (ring, row) in enumerate(zip(judged.rings, judged.nics, strict=True)):
        for source, target in zip(ring, (*ring[1:], ring[0]), strict=True):
            one = f"{head}Channel {channel:02d}/0 : {source}[0] -> {target}[0]"
            if seats[source] == seats[target]:
                lines.append(f"{one} via SHM/direct/direct")
            else:
                lines.append(f"{one} [send] via NET/IB/{row[seats[source]].exit}")
                lines.append(f"{one} [receive] via NET/IB/{row[seats[target]].entry}")
    return "\n".join(lines)


def test_hosts_of_three_classes_are_read_in_global_ranks():
    plan = mixed()
    graphs = graphs_of(plan)
    text = log_of(plan, graphs)
    found = rings_in_log(plan, graphs, text, environment(plan.settings))
    said = [one for one in found.differences if "planned was P2P" not in one]
    assert said == []
    assert len(found.found[0]) == 11
    assert all(map(same_rings, found.found[:2], plan.orders))
    ring = " ".join(map(str, found.found[0]))
    other = " ".join(map(str, reversed(found.found[0])))
    wrong = rings_in_log(
        plan, graphs, text.replace(f": {ring}\n", f": {other}\n"), environment(plan.settings)
    )
    assert any(one.startswith("channel 0 is ") for one in wrong.differences)


class FakeHosts:
    """Hosts whose ranks answer at once; stock takes `slow` times as long as the plan.

    Or jobs take what `seconds` says of a size and a host's task.
    """

    def __init__(self, *, slow=1.5, fails=lambda task: False, seconds=None):
        self.tasks, self.met, self._fails = [], [], fails
        self._seconds = seconds or (lambda size, task: 1e-3 * (1.0 if task.files else slow))

    def rendezvous(self, host, count):
        self.met.append(host)
        return [
            Rendezvous(address="10.0.0.1", port=7 + number, prefix="a") for number in range(count)
        ]

    def run(self, tasks):
        left = {host: [] for host in tasks}
        for job in zip(*tasks.values(), strict=True):
            self.tasks.append(dict(zip(tasks, job, strict=True)))
            if any(map(self._fails, job)):
                raise MeasurementError("host gpu2: rank 4: ended with code 1; no room")
            for host, task in self.tasks[-1].items():
                left[host].append(self._leave(task))
        return left

    def _leave(self, task):
        order = decode_json(task.spec, JobSpec, where="spec")
        # As noise, each job of a kind differs from the one before.
        noise = 1 + 0.001 * math.sin(len(self.tasks))
        answers = [
            JobResult(
                rank=rank,
                torch="2",
                checked=5 if order.checks else 0,
                times=tuple(
                    batches(row, [self._seconds(row.bytes, task) * noise] * 3) for row in order.rows
                ),
            )
            for rank in task.ranks
        ]
        return RankOutput(results=tuple(map(encode_json, answers)), log=f"log of {task.ranks}")


def place_of(plan, hosts, **more):
    parts = []
    for host in plan.hosts:
        gpus = plan.gpus_of(host)
        ranks = tuple(range(host.first_rank, host.first_rank + len(gpus)))
        parts.append(
            HostRanks(
                name=host.name,
                ranks=ranks,
                gpus=gpus,
                environment=caller(host.name),
            )
        )
    return Launcher(**{"hosts": tuple(parts), "runner": hosts, "backend": "host", **more})


def caller(host):
    return {
        "PATH": f"/bin/{host}",
        "NCCL_ALGO": "Tree",
        "NCCL_HOSTID": host,
        "GLOO_SOCKET_IFNAME": f"eth-{host}",
    }


def test_each_host_is_told_its_ranks_gpus_graph_and_where_all_meet(tmp_path):
    plan, hosts = mixed(), FakeHosts()
    place = place_of(plan, hosts, backend="cuda")
    target = target_of(plan, tmp_path)
    (outcome,) = place.run([target.arms[1]], JobSpec(rows=rows_of((4,))))
    assert [one.rank for one in outcome.results] == list(range(11))
    assert hosts.met == ["gpu3"]
    (tasks,) = hosts.tasks
    assert [(name, task.ranks) for name, task in tasks.items()] == [
        ("gpu3", (0, 1, 2, 3)),
        ("gpu2", (4, 5)),
        ("gpu1", (6, 7, 8, 9)),
        ("login", (10,)),
    ]
    task = tasks["gpu2"]
    order = json.loads(task.spec)
    assert (order["world"], order["first_rank"], order["backend"]) == (11, 4, "cuda")
    assert order["rendezvous"] == {"address": "10.0.0.1", "port": 7, "prefix": "a"}
    assert task.files == {"graph.xml": graphs_of(plan)["gpu2"]}
    told = task.environment
    assert told["NCCL_GRAPH_FILE"] == "{folder}/graph.xml"
    assert told["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert (told["PATH"], told["NCCL_HOSTID"]) == ("/bin/gpu2", "gpu2")
    assert "NCCL_ALGO" not in told
    assert told["NCCL_NET_DISABLE_INTRA"] == "1"


def test_default_nccl_has_neither_graph_nor_settings(tmp_path):
    plan, hosts = mixed(), FakeHosts()
    default = target_of(plan, tmp_path).arms[0]
    place_of(plan, hosts).run([default], JobSpec())
    for name, task in hosts.tasks[0].items():
        assert task.files == {}
        assert not [one for one in task.environment if one.startswith("NCCL_NET")]
        assert task.environment["GLOO_SOCKET_IFNAME"] == f"eth-{name}"


def test_a_cluster_is_verified_in_rounds_of_two_arms_and_kept(tmp_path):
    plan, hosts = mixed(), FakeHosts()
    write_plan(plan, tmp_path)
    target = target_of(plan, tmp_path)
    found = verify_target(target, place_of(plan, hosts), RunBudget(sizes=(1024, 1 << 26)))
    assert (found.machine.split(" of ")[0], found.gpus) == ("4 hosts", ())
    assert found.hosts == ("gpu3", "gpu2", "gpu1", "login")
    assert [one.name for one in found.arms] == ["default", "graph"]
    assert (found.winner, found.judged.name, found.accepted) == ("graph", "graph", True)
    assert found.order.startswith("ABCCBA")
    assert found.judged.checked == 55
    assert found.judged.predicted_gbps == plan.rate_gbps
    path = f"{tmp_path}/nccl/hosts/HOST.xml"
    assert found.judged.environment["NCCL_GRAPH_FILE"] == path
    kept = found.keep(tmp_path)
    assert Verification.load(tmp_path) == kept


def test_communicators_over_several_hosts_are_named_by_their_ranks(tmp_path):
    plan = mixed()
    slow = replace(plan.choices["variables"], settings=Settings(buffsize=1 << 20))
    hosts = FakeHosts(seconds=lambda _, task: 2e-3 if "NCCL_BUFFSIZE" in task.environment else 1e-3)
    groups = {"collective": "broadcast", "bytes": 1 << 20, "groups": ((0, 1), (4, 10))}
    rows = (WorkloadRow(**groups, dtype="float32", calls=1.0),)
    job = Workload(name="mine", source="made by a test", ranks=11, rows=rows)
    effort = RunBudget(sizes=(1024,), workload=job)
    target = target_of(replace_plan(plan, variables=slow), tmp_path)
    found = verify_target(target, place_of(plan, hosts), effort)
    assert "broadcast of 1 MiB over ranks 0,1 and 4,10 (0.50)" in found.against("variables")
    assert any(line.startswith("variables: broadcast over ranks 0,1") for line in facts_of(found))


def test_a_job_that_fails_under_the_plan_alone_is_a_no_with_its_host(tmp_path):
    plan, hosts = mixed(), FakeHosts(fails=lambda task: bool(task.files))
    write_plan(plan, tmp_path)
    target = target_of(plan, tmp_path)
    found = verify_target(target, place_of(plan, hosts), RunBudget(sizes=(1024,)))
    assert not found.accepted
    assert found.judged.failure == "host gpu2: rank 4: ended with code 1; no room"


@pytest.mark.parametrize(
    ("plan", "hosts", "refused"),
    [
        (mixed, ("gpu1", "gpu2", "gpu3", "login"), ""),
        (mixed, ("gpu1", "gpu3", "login"), "host gpu2: is in the plan, and no rank runs there"),
        (mixed, ("a", "gpu1", "gpu2", "gpu3", "login"), "host a: runs a rank and is not in"),
        (mixed, (THIS_HOST,), "host gpu1: is in the plan, and no rank runs there"),
        (lambda: plan_of(SMALL), (THIS_HOST,), ""),
        (lambda: plan_of(SMALL), ("gpu1", "gpu2"), "host gpu1: runs a rank and is not in the plan"),
    ],
)
def test_ranks_run_on_the_hosts_of_a_plan_and_nowhere_else(plan, hosts, refused):
    with pytest.raises(InputError, match=refused) if refused else nullcontext():
        check_hosts(plan(), hosts)
