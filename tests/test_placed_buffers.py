"""Plans whose bounce buffers the NCCL plugin places on NUMA nodes (simulated, assumed values)."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tccl_py.delivery.job import JobRequest, deliver
from tccl_py.delivery.placement import prefer_numa_node
from tccl_py.errors import InputError
from tccl_py.experiments.prediction import predicted_communication
from tccl_py.experiments.spec import bus_gbps
from tccl_py.experiments.target import read_target
from tccl_py.experiments.verify import stages
from tccl_py.model.rings import Hop, bounce, ring, ring_like, ring_set
from tccl_py.model.symmetry import automorphisms
from tccl_py.nccl.paths import path_types
from tccl_py.nccl.settings import Settings, check_settings, environment, settings_from_environment
from tccl_py.nccl.system import PathType
from tccl_py.nccl.transport import hop_space
from tccl_py.nccl.view import view
from tccl_py.plan.chains import SubsetRings, sender_nodes
from tccl_py.plan.directory import write_plan
from tccl_py.plan.machine_files import placement
from tccl_py.planning.handle import load_plan
from tccl_py.planning.parts import images_of_rings
from tccl_py.planning.planner import make_plan
from tccl_py.planning.request import OneNode
from tccl_py.planning.settings_search import placements
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.workloads.workload import Workload, WorkloadRow
from tests.commands import tccl
from tests.planned import ASUS, PCIE, as_only, plan_of, task_on, through
from tests.plugin.runs import plugin_library
from tests.skips import lacking, needs

PLACED = Settings(shm_locality="sender", shm_placement=True)


@pytest.fixture(scope="module")
def plan():
    return plan_of(PCIE)


@pytest.fixture(scope="module")
def directory(plan, tmp_path_factory):
    place = tmp_path_factory.mktemp("plans") / "placed"
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        if not lacking("a C compiler"):
            patch.setattr("tccl_py.nccl.plugin.INSTALLED", plugin_library().parent)
        write_plan(plan, place, models=as_only(load_bundled(PCIE)))
    return place


@pytest.fixture
def without_library(plan, tmp_path, monkeypatch):
    """The same as an installation without a C compiler writes it."""
    monkeypatch.setattr("tccl_py.plan.machine_files.found_library", lambda *_: None)
    place = tmp_path / "without-library"
    place.mkdir()
    write_plan(plan, place, models=as_only(load_bundled(PCIE)))
    return place


def all_rates(model, settings):
    """Yield the rate of each single ring over all GPUs, through any NUMA nodes."""
    space = hop_space(view(model.machine, model.knowledge, settings))
    first, *rest = space.gpus
    source = Simulator(model)
    for order in itertools.permutations(rest):
        pairs = itertools.pairwise((first, *order, first))
        for hops in itertools.product(*(space.between(*pair) for pair in pairs)):
            found = ring_set([ring(hops)])
            (measurement,) = source.measure([found.flows])
            yield found.rate(measurement)


def test_bounces_through_chosen_nodes_are_three_times_default_nccl_on_a_simulated_machine(plan):
    assert plan.recommended == "graph"
    assert plan.needs_plugin
    assert plan.gain("graph") >= 3
    assert plan.simulated and plan.assumed


def test_no_choice_of_nodes_is_faster(plan):
    settings = msgspec.structs.replace(plan.settings, channels=1)
    best = max(all_rates(load_bundled(PCIE), settings))
    alone = make_plan_of_one_ring()
    assert alone.rate_gbps == pytest.approx(best)


def make_plan_of_one_ring():
    return make_plan(PCIE, ring_counts=(1,))


@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (0, 1, 2, -1), (-1,) * 4])
def test_buffers_are_placed_only_where_the_kernel_numbers_all_nodes(ids):
    model = load_bundled(PCIE)
    nodes = [
        msgspec.structs.replace(node, numa_id=number)
        for node, number in zip(model.machine.numa_nodes, ids, strict=False)
    ]
    machine = msgspec.structs.replace(model.machine, numa_nodes=tuple(nodes))
    task = task_on(machine, model.knowledge, Simulator(model))
    assert bool(placements(task)) == (-1 not in ids[: len(nodes)])
    assert all(kind.shm_placement and kind.shm_locality == "sender" for kind in placements(task))
    assert placements(msgspec.structs.replace(task, nics=(0,))) == ()


@pytest.mark.parametrize("name", [PCIE, ASUS])
def test_images_of_rings_have_the_nodes_of_their_own_gpus_in_order(name):
    model = load_bundled(name)
    near = {gpu: model.machine.numa_of(f"G{gpu}") for gpu in model.machine.gpu_indices}
    for gpus in itertools.combinations(near, 2):
        nodes = tuple(map(near.get, gpus))
        planned = SubsetRings(gpus=gpus, rings=(gpus,), rate_gbps=1.0, nodes=nodes)
        images = images_of_rings(planned, automorphisms(model.machine, model.knowledge))
        assert gpus in images
        assert all(image.nodes == tuple(map(near.get, of)) for of, image in images.items())


def test_each_gpu_bounces_through_one_node_in_all_rings():
    def hops(*nodes):
        pairs = [(0, 1), (1, 2), (2, 0)]
        ends = zip(pairs, nodes, strict=False)
        return [rule.mark(Hop(*pair, bounce(*pair, node))) for pair, node in ends]

    rule = OneNode()
    assert rule.admits([hops(0, 1, 1)])
    assert rule.admits([hops(0, 1, 1), hops(0, 1)])
    assert not rule.admits([hops(0, 1, 1), hops(0, 0)])


def test_a_ring_under_other_settings_keeps_the_nodes_of_its_bounces():
    model, placed = load_bundled(PCIE), {"shm_locality": "sender", "shm_placement": True}

    def space(channels):
        chosen = Settings(p2p_level="LOC", channels=channels, **placed)
        return hop_space(view(model.machine, model.knowledge, chosen))

    choices = [space(4).between(at, (at + 1) % 4) for at in range(4)]
    for nodes in itertools.product(range(4), repeat=4):
        hops = [
            next(hop for hop in of_pair if hop.flow.through == node)
            for of_pair, node in zip(choices, nodes, strict=True)
        ]
        again = ring_like(space(8), ring(hops))
        assert tuple(hop.flow.through for hop in again.hops) == nodes
        assert {hop.flow.blocks for hop in again.hops} == {16}


def test_rings_of_a_set_share_the_nodes_of_their_gpus():
    found = make_plan(PCIE, ring_counts=(2,))
    nodes = {(hop.source, hop.flow.through) for one in found.rings for hop in one.hops}
    if found.settings.shm_placement:
        assert len(nodes) == len(found.gpus)
    assert found.gain(found.recommended) >= 1


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A plan for an NCCL without plugins."""
    place = tmp_path_factory.mktemp("plans")
    model = load_bundled(PCIE)
    write_plan(plan_of(PCIE, version="2.26"), place, models=as_only(model))
    return place


def run(directory, **variables):
    """Run `tccl run`; return its stderr, the job's graph file, and the job's memory policy."""
    script = "echo ${NCCL_GRAPH_FILE-none}; head -n 1 /proc/self/numa_maps | cut -d' ' -f2"
    known = {name: text for name, text in os.environ.items() if "RANK" not in name}
    clean = {name: text for name, text in known.items() if not name.startswith("NCCL_")}
    command = [sys.executable, "-m", "tccl_py", "run", directory, "--nccl", "2.26", "--"]
    done = subprocess.run(
        [*map(str, command), "sh", "-c", script],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr, *done.stdout.split()


def test_without_plugins_a_rank_that_tccl_run_starts_prefers_its_node(old):
    said, graph, policy = run(old, OMPI_COMM_WORLD_LOCAL_RANK="0")
    assert graph == f"{old}/nccl/graph.xml"
    if "cannot be preferred" in said:
        pytest.skip("this host forbids memory policies")
    assert policy == "prefer:0"
    assert "all memory" in said


def test_a_node_that_is_not_there_cannot_be_preferred(old):
    rank = {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}
    said, graph, policy = run(old, **rank, CUDA_VISIBLE_DEVICES="3,2,1,0")
    if Path("/sys/devices/system/node/node2").exists():
        pytest.skip("node 2 is there")
    assert "NUMA node 2 cannot be preferred" in said
    assert (graph, policy) == (f"{old}/nccl/graph.xml", "default")


@pytest.mark.parametrize("node", [-1, 1024, 1 << 40])
def test_a_number_that_no_node_has_is_told_and_no_error(node):
    assert "no such node" in prefer_numa_node(node)


def test_without_plugins_a_launcher_of_ranks_gets_variables_alone(old):
    said, graph, policy = run(old)
    assert (graph, policy) == ("none", "default")
    assert "variables alone" in said
    assert "tccl run" in load_plan(old).advice


def test_machines_without_numa_ids_get_no_placement():
    model = load_bundled(PCIE)
    nodes = tuple(msgspec.structs.replace(one, numa_id=-1) for one in model.machine.numa_nodes)
    machine = msgspec.structs.replace(model.machine, numa_nodes=nodes)
    found = make_plan(machine, model.knowledge, Simulator(model))
    assert not found.needs_plugin


def test_settings_with_placement_are_read_back_and_need_the_senders_side():
    assert settings_from_environment(environment(PLACED)) == PLACED
    assert not settings_from_environment({"NCCL_CUMEM_HOST_ENABLE": "0"}).shm_placement
    with pytest.raises(InputError):
        check_settings(Settings(shm_placement=True))


def test_the_index_has_the_nodes_of_the_planned_hops(plan, directory):
    lines = (directory / "nccl" / "plugin.index").read_text().splitlines()
    sets = {line.split()[1]: line.split() for line in lines if line.startswith("set ")}
    ids = {node.index: node.numa_id for node in plan.machine.numa_nodes}
    gaining = [one for one in plan.subsets if one.gains]
    assert len(sets) == len(gaining) + 1 < len(plan.subsets)
    whole = sender_nodes(plan.machine, plan.rings)
    for gpus, nodes in ((plan.gpus, whole), *((one.gpus, one.nodes) for one in gaining)):
        named = ",".join(str(ids[node]) for node in nodes)
        assert f"NODES={named}" in sets[",".join(map(str, gpus))]
    assert "need NCCL_CUMEM_HOST_ENABLE 0" in lines
    assert "need NCCL_SHM_LOCALITY 1" in lines


def predicted(plan, collective, gpus):
    """Steps of one large call over a set of GPUs, by choice and a model."""
    groups = (tuple(map(plan.gpus.index, gpus)),)
    row = WorkloadRow(collective=collective, dtype="int8", bytes=1 << 30, groups=groups, calls=1)
    job = Workload(name="", source="", ranks=len(plan.gpus), rows=(row,))
    return predicted_communication(plan, job, Simulator(load_bundled(PCIE))).choices


def test_sets_of_gpus_that_gain_nothing_over_nccls_own_rings_get_no_file(plan, directory):
    for one in plan.subsets:
        # Variables alone are default NCCL here.
        default = predicted(plan, "all_reduce", one.gpus)["default"].seconds
        gbps = bus_gbps("all_reduce", len(one.gpus), 1 << 30, default)
        assert one.gains == (one.rate_gbps > 1.01 * gbps)
    for one in (one for one in plan.subsets if not one.gains):
        gpus = ",".join(map(str, one.gpus))
        answer = tccl("env", str(directory), "--json", "--gpus", gpus)
        found = json.loads(answer.stdout)
        assert (answer.exit_code, found["choice"], found["environment"]) == (0, "variables", {})


def test_rates_of_subsets_are_those_of_their_nodes(plan):
    source = Simulator(load_bundled(PCIE))
    for one in plan.subsets:
        space = hop_space(
            view(plan.machine, plan.knowledge, plan.settings, gpus=one.gpus),
            rings_in_set=len(one.rings),
        )
        rings = ring_set([ring_like(through(space, one), order) for order in one.rings])
        (measurement,) = source.measure([rings.flows])
        assert rings.rate(measurement) == pytest.approx(one.rate_gbps)


def test_no_collective_is_slower_than_by_default_nccl(plan):
    names = ("all_reduce", "broadcast", "all_to_all")
    speeds = [predicted(plan, name, plan.gpus)["graph"].speed.middle for name in names]
    assert min(speeds) > 0.999
    assert max(speeds) >= 3


def test_flows_through_nodes_without_gpus_have_a_path(plan):
    # Node 2 of this machine has no device, so NCCL's own graph of it leaves the node out.
    assert path_types(plan.machine)["C2", "G3"] is PathType.SYS
    assert path_types(plan.machine)["C2", "C3"] is PathType.SYS


WITH_PLUGIN = {"NCCL_ENV_PLUGIN", "TCCL_INDEX", "NCCL_CUMEM_HOST_ENABLE", "NCCL_SHM_LOCALITY"}


def test_settings_of_placed_buffers_are_not_tuned_and_run_with_the_plugin(plan, directory):
    needs("a C compiler")
    target = read_target(plan, directory)
    assert set(target.arm("graph").variables) == WITH_PLUGIN
    assert not [found for stage in stages(target, "graph") for found in stage(plan.settings)]
    assert any(
        list(stage(plan.choices["variables"].settings)) for stage in stages(target, "variables")
    )


def test_jobs_get_placed_buffers_by_the_plugin_alone(directory):
    script = (directory / "nccl" / "env.sh").read_text()
    assert "export" not in script
    assert "NCCL_" not in (directory / "nccl" / "nccl.conf").read_text()
    needs("a C compiler")
    found = tccl("env", str(directory), "--json")
    assert found.exit_code == 0
    assert set(json.loads(found.stdout)["environment"]) == WITH_PLUGIN


def test_without_the_plugins_library_jobs_get_variables_or_memory_on_their_node(
    plan, without_library, monkeypatch
):
    place = without_library
    found = tccl("env", str(place), "--json")
    assert found.exit_code == 0
    answer = json.loads(found.stdout)
    assert (answer["choice"], answer["environment"]) == ("variables", {})
    assert "no single rank" in found.stderr and "tccl_py.nccl.plugin.build" in found.stderr
    asked = tccl("env", str(place), "--choice", "graph")
    assert (asked.exit_code, "export NCCL_GRAPH_FILE" in asked.stdout) == (1, False)
    assert tccl("env", str(place), "--plugin").exit_code == 2
    # A rank of its own can have its memory placed.
    told = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(plan.gpus)))
    delivery = deliver(plan, place, JobRequest(command=("./job",)), say=told.append)
    assert (delivery.choice.name, told) == ("graph", [])
    assert delivery.numa_id == placement(plan, plan.gpus)[plan.gpus[1]]
    assert delivery.variables["NCCL_GRAPH_FILE"] == str(place / "nccl" / "graph.xml")


def test_a_choice_whose_jobs_need_a_library_that_is_missing_has_no_arm(plan, without_library):
    target = read_target(plan, without_library)
    assert {arm.name for arm in target.arms} == {"default"}  # variables set nothing
    assert list(target.left_out) == ["graph"]
    with pytest.raises(InputError, match="no library"):
        target.arm("graph")
