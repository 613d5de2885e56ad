"""Plans of hosts in network namespaces: the one found is the best that the shaping allows."""

import itertools
import json

import pytest

from tccl_py.nccl.settings import environment
from tccl_py.nccl.validator import NodeJob, validate_cluster
from tccl_py.plan.load import load_plan
from tccl_py.plan.probe_hosts import whole_ring
from tests.namespaces import PAYLOAD, RACKS, namespaces_in
from tests.test_cli_plan import done

pytestmark = pytest.mark.mpi

LINK_GBPS, UPLINK_GBPS = 0.25, 0.1
"""Quicker than elsewhere: a set takes windows of many slices, whose time is that of the links."""
GIVEN = ("h0", "h2", "h1", "h3")
"""Hosts of the two racks in turn: in this order the ring crosses the slow uplink four times."""
SWITCHES = """\
switches:
  - name: rack-a
    hosts: [h0, h1]
  - name: rack-b
    hosts: [h2, h3]
"""


def shaped_rate(order):
    """What the shaped network leaves of a ring in this order, GB/s."""
    steps = zip(order, (*order[1:], order[0]), strict=True)
    passes = sum(RACKS[one] == "rack-a" and RACKS[other] == "rack-b" for one, other in steps)
    return min(LINK_GBPS, UPLINK_GBPS / passes) * PAYLOAD


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quick")
    with namespaces_in(folder, link_gbps=LINK_GBPS, uplink_gbps=UPLINK_GBPS) as made:
        yield made


@pytest.fixture(scope="module")
def planned(namespaces, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    switches = folder / "switches.yaml"
    switches.write_text(SWITCHES)
    command = ["plan", "-o", str(folder / "plan"), "--backend", "host", "--devices", "1"]
    command += ["--interfaces", "eth0", "--switches", str(switches), "--rings", "1"]
    # One chain is possible in a host: more sets would be the same again.
    command += ["--target", "0.3", "--max-sets", "4", "--json"]
    ran = namespaces.run(*command, hosts=GIVEN, timeout_s=240)
    assert ran.code == 0, ran.stderr
    return json.loads(ran.stdout), folder / "plan"


def test_the_order_found_is_the_best_of_all_orders_on_the_shaped_network(planned):
    told, _ = planned
    best = max(map(shaped_rate, itertools.permutations(GIVEN)))
    assert not told["simulated"]
    assert sorted(told["hosts"]) == sorted(GIVEN)
    assert shaped_rate(told["hosts"]) == best > shaped_rate(GIVEN)
    # The uplink's rate was not told: pairs of hosts across it were measured.
    assert told["rate_gbps"] == pytest.approx(best, rel=0.2)
    assert any("the uplink of switch rack-" in notice for notice in told["notices"])


def test_the_files_of_every_host_close_into_the_rings_planned(planned):
    told, directory = planned
    plan = load_plan(directory)
    jobs = []
    for host in plan.hosts:
        node = plan.cluster.classes[plan.cluster.host_classes[host.name]]
        graph = (directory / "nccl" / "hosts" / f"{host.name}.xml").read_text()
        jobs.append(NodeJob(machine=node.machine, knowledge=node.knowledge, graph=graph))
    found = validate_cluster(
        jobs, version=plan.settings.version, environment=environment(plan.settings)
    )
    assert found.verdict == "used", found
    assert {tuple(ring) for ring in found.rings} == {tuple(ring) for ring in told["rings"]}


def test_every_set_was_measured_on_hosts_by_their_names(planned):
    _, directory = planned
    lines = (directory / "measurements.jsonl").read_text().splitlines()
    sets = [json.loads(line).get("transfers", "") for line in lines[1:]]
    assert sets
    assert all(text.startswith(("h0.", "h1.", "h2.", "h3.")) for text in sets)


def test_the_plan_is_explained_and_checked_on_its_hosts(planned, namespaces):
    _, directory = planned
    plan = load_plan(directory)
    ran = namespaces.run("explain", str(directory), "--json", "--max-sets", "4", hosts=GIVEN)
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert not found["simulated"]
    assert {ring["node_class"] for ring in found["rings"]} == {plan.cluster.classes[0].name}
    assert all(ring["slowest"] for ring in found["rings"])
    ran = namespaces.run("check", str(directory), "--json", "--max-seconds", "4", hosts=GIVEN)
    assert ran.code in (0, 1), ran.stderr
    assert json.loads(ran.stdout)["sets_compared"] > 0
    ran = namespaces.run("check", str(directory), hosts=GIVEN[:2])
    assert ran.code == 2
    assert "other hosts" in ran.stderr


# Jobs over some of the hosts, by the tables of the plan.


def test_every_pair_gets_what_the_shaped_network_leaves_and_nothing_is_measured(planned, tmp_path):
    _, directory = planned
    before = (directory / "measurements.jsonl").read_bytes()
    for pair in itertools.combinations(GIVEN, 2):
        place = tmp_path / "-".join(pair)
        done("export", directory, "--hosts", ",".join(pair), "-o", place)
        job = load_plan(place)
        assert job.host_order == pair
        assert not job.simulated
        beside = len({RACKS[host] for host in pair}) == 1
        expected = LINK_GBPS * PAYLOAD if beside else shaped_rate(pair)
        assert job.rate_gbps == pytest.approx(expected, rel=0.2)
    assert (directory / "measurements.jsonl").read_bytes() == before


def test_a_pair_gets_what_its_ring_has_when_it_is_measured_alone(planned, namespaces, tmp_path):
    _, directory = planned
    done("export", directory, "--hosts", "h0,h1", "-o", tmp_path / "job")
    job = load_plan(tmp_path / "job")
    ring = str(whole_ring(job))
    ran = namespaces.run(
        "measure", ring, "--backend", "host", "--devices", "1", "--interfaces", "eth0", "--target",
        "0.3", "--json", hosts=("h0", "h1"), timeout_s=240,
    )  # fmt: skip
    assert ran.code == 0, ran.stderr
    (found,) = json.loads(ran.stdout)
    assert job.rate_gbps == pytest.approx(min(found["gbps"]), rel=0.2)
