"""A job's files over hosts, loaded by NCCL's own code: a process a rank, a host id a host."""

import msgspec
import pytest

from tccl_py.model.machine import Nic, PciLink
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.nccl.settings import environment
from tccl_py.plan.cluster_planner import make_cluster_plan
from tccl_py.plan.directory import write_job, write_plan
from tccl_py.plan.table_jobs import plan_of_job
from tccl_py.plan.tables import table_files
from tccl_py.readers.hosts import HostSlots
from tccl_py.readers.nccl_topology import read_nccl_topology
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import model_for
from tccl_py.simulator.source import Simulator
from tests.nccl_host import TOPOLOGIES
from tests.plugin.runs import TOPOLOGY, VERSIONS, needs_host, run_ranks

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
    needs_host()
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
    needs_host(version)
    plan, place = planned
    hosts = [HostSlots(name) for name in JOBS[job]]
    made, classes = plan_of_job(plan, place, hosts, JOBS[job])
    write_job(made, tmp_path / "job", dict.fromkeys(classes, "{}"))
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
        assert world.rings
        for channel, following in world.rings.items():
            order = made.orders[channel % made.ring_count]
            assert following == order[(order.index(rank) + 1) % len(order)]
