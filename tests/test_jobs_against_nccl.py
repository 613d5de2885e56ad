"""A job's files over hosts, loaded by NCCL's own code: a process a rank, a host id a host."""

import msgspec
import pytest

from tccl_py.model.machine import Nic, PciLink
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.nccl.settings import environment
from tccl_py.plan.directory import write_new_plan, write_plan
from tccl_py.plan.tables import table_files
from tccl_py.planning.jobs import plan_of_job
from tccl_py.planning.planner import make_cluster_plan
from tccl_py.readers.hosts import HostSlots
from tccl_py.readers.nccl_topology import read_nccl_topology
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import model_for
from tccl_py.simulator.source import Simulator
from tests.planned import needing_a_graph
from tests.plugin.runs import (
    TOPOLOGIES,
    TOPOLOGY,
    VERSIONS,
    needs_release,
    plugin_library,
    run_ranks,
)

pytestmark = pytest.mark.gpu(count=8)

JOBS = {
    "two hosts": {"h1": (0, 1), "h3": (0, 1)},
    "three hosts": {"h3": (0, 1), "h1": (0, 1), "h2": (0, 1)},
    "unlike GPUs": {"h1": (0, 1, 2, 3), "h2": (0, 1)},
}


def machine():
    """The machine that NCCL is shown, with the loopback interface where NCCL puts it."""
    found = read_nccl_topology(TOPOLOGIES / TOPOLOGY)
    link = PciLink(speed_gts=8.0, width=4)
    loop = Nic(
        index=0, name="lo", parent="C0", bus_id="", link=link, speed_mbps=10_000, gdr=False, guid=""
    )
    return msgspec.structs.replace(found, nics=(loop,))


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan of three hosts with its tables, and its directory."""
    needs_release("2.28.9")
    place, own = tmp_path_factory.mktemp("planned"), machine()
    cluster = cluster_of([HostReport(host=f"h{n}", machine=own, slots=4) for n in (1, 2, 3)])
    tables = []
    plan = make_cluster_plan(
        cluster,
        [Simulator(model_for(own))],
        version="2.28",
        ring_counts=(1,),
        budget=Budget(sets=40, idle_sets=10),
        tables=tables,
        gpus_per_job="2",
    )
    write_plan(plan, place, tables=table_files(tables))
    return plan, place


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("job", JOBS)
def test_nccl_runs_the_rings_of_a_job_with_its_files(planned, job, version, tmp_path):
    needs_release(version)
    plan, place = planned
    hosts = [HostSlots(name) for name in JOBS[job]]
    made = plan_of_job(plan, place, hosts, JOBS[job])
    write_new_plan(made, tmp_path / "job", {one.name: "{}" for one in made.cluster.classes})
    ranks = [(host.name, gpu) for host in made.hosts for gpu in made.gpus_of(host)]
    folder = tmp_path / "job" / "nccl" / "hosts"
    result = run_ranks(
        tmp_path / "run",
        "world",
        len(ranks),
        plan=None,
        version=version,
        gpus=[gpu for _, gpu in ranks],
        env=environment(made.settings),
        rank_env={
            rank: {"NCCL_HOSTID": host, "NCCL_GRAPH_FILE": str(folder / f"{host}.xml")}
            for rank, (host, _) in enumerate(ranks)
        },
    )
    assert not result.errors
    assert set(result.codes.values()) == {0}
    for rank, (world,) in enumerate(result.made):
        assert world.code == 0
        assert set(world.files) == {str(folder / f"{ranks[rank][0]}.xml")}
        assert_planned(world, made, rank)


def assert_planned(world, made, rank):
    assert world.rings
    for channel, following in world.rings.items():
        order = made.orders[channel % made.ring_count]
        assert following == order[(order.index(rank) + 1) % len(order)]


@pytest.fixture(scope="module")
def job(planned, tmp_path_factory):
    """A job that needs its graph files, its ranks as (host, GPU), and its variables."""
    plan, place = planned
    gpus = JOBS["unlike GPUs"]
    made = plan_of_job(plan, place, [HostSlots(name) for name in gpus], gpus)
    made = needing_a_graph(made)
    folder = tmp_path_factory.mktemp("jobs") / "job"
    write_new_plan(made, folder, {one.name: "{}" for one in made.cluster.classes})
    ranks = [(host.name, gpu) for host in made.hosts for gpu in made.gpus_of(host)]
    env = {"NCCL_ENV_PLUGIN": str(plugin_library()), "TCCL_JOB": str(folder)}
    return made, ranks, env | environment(made.settings)


def run_job(folder, ranks, env, *, scenario="world", version="2.28.9", rank_env=None):
    result = run_ranks(
        folder,
        scenario,
        len(ranks),
        plan=None,
        version=version,
        gpus=[gpu for _, gpu in ranks],
        env=env,
        rank_env={
            rank: {"NCCL_HOSTID": host, "SLURMD_NODENAME": host} | (rank_env or {}).get(rank, {})
            for rank, (host, _) in enumerate(ranks)
        },
    )
    assert not result.errors
    assert set(result.codes.values()) == {0}
    assert {one.code for made in result.made for one in made} == {0}
    return result.made


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plugin_gives_a_jobs_files_to_its_whole_communicator_alone(job, version, tmp_path):
    needs_release(version)
    made, ranks, env = job
    for rank, found in enumerate(run_job(tmp_path / "run", ranks, env, scenario="many")):
        for one in found:
            if one.name in ("world", "later"):
                assert one.graph.startswith("path-") and one.graph.endswith(".graph")
                assert_planned(one, made, rank)
            else:
                assert one.graph == "" and one.files == []


@pytest.mark.parametrize(
    "changes",
    [
        {"NCCL_ENV_PLUGIN": None},
        {"TCCL_JOB": "/nowhere"},
        {"SLURMD_NODENAME": "other"},
        {"NCCL_SOCKET_IFNAME": "lo"},
    ],
    ids=str,
)
def test_a_host_without_the_jobs_files_leaves_a_valid_ring(job, changes, tmp_path):
    """Hosts cannot see each other's choices; NCCL joins any chains of whole hosts."""
    needs_release("2.28.9")
    _, ranks, env = job
    first = [rank for rank, (host, _) in enumerate(ranks) if host == ranks[0][0]]
    found = run_job(tmp_path / "run", ranks, env, rank_env={first[-1]: changes})
    graphs = [made[0].graph != "" for made in found]
    assert graphs == [rank not in first for rank in range(len(ranks))]
    for channel in found[0][0].rings:
        ring = [0]
        while len(ring) < len(ranks):
            ring.append(found[ring[-1]][0].rings[channel])
        assert sorted(ring) == list(range(len(ranks)))


def test_ranks_on_other_gpus_of_a_host_get_default_nccl_there(job, tmp_path):
    needs_release("2.28.9")
    _, ranks, env = job
    moved = [(host, gpu + 4 * (host == ranks[0][0])) for host, gpu in ranks]
    found = run_job(tmp_path / "run", moved, env)
    assert [made[0].graph != "" for made in found] == [host != ranks[0][0] for host, _ in ranks]
