"""Plans of hosts in network namespaces: the one found is the best that the shaping allows."""

import itertools
import json
import os
import shutil
import subprocess

import msgspec
import pytest

from tccl_py.model.measurement import JOURNAL_FILE
from tccl_py.nccl.settings import environment
from tccl_py.nccl.validator import NodeJob, validate_cluster
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.tables import kept_files
from tccl_py.planning.jobs import plan_of_job
from tccl_py.readers.hosts import HostSlots
from tests.namespaces import PAYLOAD, RACKS, ended, namespaces_in, near
from tests.skips import needs_idle_cores, unless_busy
from tests.test_cli_plan import done

pytestmark = pytest.mark.mpi

LINK_GBPS, UPLINK_GBPS = 0.5, 0.3
"""Quicker than elsewhere: a set takes windows of many slices, whose time is that of the links."""
FEW = ("--backend", "host", "--devices", "1", "--interfaces", "eth0", "--target", "0.3")
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
    needs_idle_cores()
    folder = tmp_path_factory.mktemp("plan")
    switches = folder / "switches.yaml"
    switches.write_text(SWITCHES)
    # One chain is possible in a host: more sets would be the same again.
    command = ["plan", str(folder / "plan"), *FEW, "--rings", "1", "--max-sets", "1"]
    command += ["--switches", str(switches), "--json"]
    with unless_busy(workers=4):
        ran = namespaces.run(*command, hosts=GIVEN, timeout_s=240)
        assert ran.code == 0, ran.stderr
    return json.loads(ran.stdout), folder / "plan"


def test_the_order_found_is_the_best_of_all_orders_on_the_shaped_network(planned):
    told, _ = planned
    best = max(map(shaped_rate, itertools.permutations(GIVEN)))
    assert not told["simulated"]
    assert sorted(told["hosts"]) == sorted(GIVEN)
    # The uplink's rate was not told: pairs of hosts across it were measured.
    with unless_busy(workers=4):
        assert shaped_rate(told["hosts"]) == best > shaped_rate(GIVEN)
        assert told["rate_gbps"] == near(best)
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
    refused = namespaces.start("check", str(directory), hosts=GIVEN[:2])
    words = ("show", "--why", str(directory), "--json", "--max-sets", "8")
    with unless_busy(workers=4):
        ran = namespaces.run(*words, hosts=GIVEN)
        assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert not found["simulated"]
    assert {ring["node_class"] for ring in found["rings"]} == {plan.cluster.classes[0].name}
    assert all(ring["slowest"] for ring in found["rings"])
    words = ("check", str(directory), "--json", "--max-seconds", "60")
    with unless_busy(workers=4):
        ran = namespaces.run(*words, hosts=GIVEN)
        assert ran.code in (0, 1), ran.stderr
    assert json.loads(ran.stdout)["sets_compared"] > 0
    ran = ended(refused)
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
        with unless_busy(workers=4):
            assert job.rate_gbps == near(expected)
    assert (directory / "measurements.jsonl").read_bytes() == before


# A plan of two hosts grows by two more, one of them slowed; a host of the plan does not run.

SLOW_GBPS = 0.25


@pytest.fixture(scope="module")
def grown(planned, namespaces, tmp_path_factory):
    """The directory before and after."""
    folder = tmp_path_factory.mktemp("growing")
    before, after = folder / "before", folder / "after"
    shutil.copytree(planned[1], before)
    whole = load_plan(before)
    two = plan_of_job(whole, before, [HostSlots("h0"), HostSlots("h1")])
    cluster = msgspec.structs.replace(two.cluster, switches=None)
    # A chain that is the only one of a host is measured as a whole alone.
    two = msgspec.structs.replace(two, cluster=cluster, strategy="nccl-order")
    write_plan(two, before, tables=kept_files(before))
    shutil.copytree(before, after)
    with namespaces.other_rates({"h3": SLOW_GBPS}, uplink_gbps=4 * LINK_GBPS):
        command = ["plan", str(after), *FEW, "--rings", "1", "--max-sets", "1"]
        with unless_busy(workers=4):
            ran = namespaces.run(*command, hosts=("h1", "h2", "h3"), timeout_s=240)
            assert ran.code == 0, ran.stderr
    return before, after


def test_an_equal_host_is_sampled_and_a_slow_one_gets_a_class_of_its_own(grown):
    before, after = grown
    plan = load_plan(after)
    assert plan.cluster.names == ("h0", "h1", "h2", "h3")
    classes = plan.cluster.host_classes
    with unless_busy(workers=4):
        assert classes["h0"] == classes["h1"] == classes["h2"] != classes["h3"]
        assert any("samples: h2" in notice for notice in plan.notices)
        assert any(notice.startswith("host h3: ") and "slower" in notice for notice in plan.notices)
    # What was measured is kept, and the class of h2 was not measured again.
    old, new = ((place / JOURNAL_FILE).read_text().splitlines() for place in (before, after))
    assert new[: len(old)] == old
    sets = [json.loads(line)["transfers"] for line in new[len(old) :]]
    assert 0 < len([text for text in sets if "h2." in text and "h3." not in text]) <= 6


def test_every_pair_of_the_grown_plan_gets_what_its_links_have(grown, tmp_path):
    _, after = grown
    for pair in itertools.combinations(load_plan(after).cluster.names, 2):
        place = tmp_path / "-".join(pair)
        done("export", after, "--hosts", ",".join(pair), "-o", place)
        slowest = SLOW_GBPS if "h3" in pair else LINK_GBPS
        with unless_busy(workers=4):
            assert load_plan(place).rate_gbps == near(slowest * PAYLOAD)


# The proof of links, for which hosts have no GPUs here: another program stands in for the doctor.

STAND_IN = """\
import socket, sys
from tccl_py import children
real = children.child_command

def command(module, *arguments):
    if arguments[:1] != ("doctor",):
        return real(module, *arguments)
    verdict = {"h1": "hangs", "h2": "sound"}.get(socket.gethostname())
    links = {"verdict": verdict, "what": " ".join(arguments)} if verdict else None
    report = {"host": "", "facts": {}, "links": links}
    return [sys.executable, "-c", f"import json; print(json.dumps({report}))"]

children.child_command = command
"""
CONTROLLER = """\
import sys
from tccl_py.files import encode_json
from tccl_py.sources.hosts import join_job, open_hosts
with join_job() as job:
    if not job.is_controller:
        sys.exit(job.serve())
    with open_hosts(job, backend="host", devices=1, interfaces="eth0") as source:
        proofs = source.session.proofs(force=True)
        print(encode_json({host: [proof.verdict, proof.what] for host, proof in proofs.items()}))
"""


def test_every_host_of_a_job_proves_its_own_links(namespaces, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    program = tmp_path / "controller.py"
    program.write_text(CONTROLLER)
    *launcher, _, _ = namespaces.mpirun(hosts=("h0", "h1", "h2"))
    more = {"env": {**os.environ, "PYTHONPATH": str(tmp_path)}, "timeout": 120}
    command = [*launcher[:-1], "-x", "PYTHONPATH", launcher[-1], str(program)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, **more)
    assert ran.returncode == 0, ran.stderr
    said = "doctor --json --prove"
    assert json.loads(ran.stdout) == {"h1": ["hangs", said], "h2": ["sound", said]}


def test_doctor_of_a_job_compares_its_hosts(namespaces):
    ran = namespaces.run("doctor", "--passive", "--json", hosts=("h0", "h1", "h2"))
    found = json.loads(ran.stdout)
    assert found["hosts"] == 3
    assert {report["host"] for report in found["reports"]} == {"h0", "h1", "h2"}
    # Nothing but NVIDIA's driver is missing, on each.
    assert found["differences"] == []
    assert ran.code == 1
