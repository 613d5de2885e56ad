"""Databases of the TCCL fork: against brute force, and what its runtime makes of them."""

import functools
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError, MeasurementError, SearchError
from tccl_py.model.machine import Knowledge, Nic, check
from tccl_py.model.rings import Hop, Ring, entering, leaving, ring, ring_set
from tccl_py.model.transfer import Fifo, Flow, transfer_set
from tccl_py.nccl.network import WORLD
from tccl_py.plan.planner import make_plan
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled, model_for
from tccl_py.simulator.source import Simulator
from tccl_py.sources.remembering import RememberingSource
from tccl_py.tccl_fork.database import make_database, mask_of, numa_ids, typed
from tccl_py.tccl_fork.search import (
    MOST_CHANNELS,
    DatabaseSearch,
    DatabaseTask,
    plan_channels,
    throughs,
)
from tests.fakes import SharedResources
from tests.planned import PCIE, SMALL, plan_of, with_parts
from tests.tccl_databases import (
    Crossing,
    Database,
    NodeChain,
    NodeChains,
    TypedTransfer,
    encoded,
    gpus_of,
    small_database,
)
from tests.tccl_runtime import check_database, found_ring, parse_tccl_xml
from tests.toy import toy_machine

EIGHT = "supermicro-h12dsg-8x3090"
"""8 GPUs that cannot access each other, on 2 NUMA nodes; no NIC."""


def with_nics(machine, *parents, gdr=True, speed_mbps=100_000):
    """The machine with a NIC at each of these parents, which reaches all GPUs' memory or none."""
    nics = tuple(
        Nic(index=i, name=f"mlx5_{i}", parent=parent, speed_mbps=speed_mbps, gdr=gdr)
        for i, parent in enumerate(parents)
    )
    gpus = tuple(msgspec.structs.replace(gpu, gdr=gdr) for gpu in machine.gpus)
    return check(msgspec.structs.replace(machine, nics=nics, gpus=gpus), where=machine.name)


def unlike(machine):
    """The machine with GPUs of different names, so that no symmetry is left."""
    gpus = tuple(msgspec.structs.replace(gpu, name=f"GPU {gpu.index}") for gpu in machine.gpus)
    return msgspec.structs.replace(machine, gpus=gpus)


def task_of(machine, source, *, knowledge=None, gpus=None, max_sets=100_000, **more):
    return DatabaseTask(
        **{
            "machine": machine,
            "knowledge": knowledge or Knowledge(),
            "source": RememberingSource(source),
            "gpus": tuple(gpus or machine.gpu_indices),
            "subsets": None,
            "blocks": 2,
            "fifo_bytes": 1 << 20,
            "rings": (),
            "max_sets": max_sets,
            **more,
        }
    )


def searched_rings(task):
    search = DatabaseSearch(task)
    search.find_rings()
    return search


def random_resources(seed):
    """Every pair of devices has a link of its own each way, and every device a limit."""
    rates = np.random.default_rng(seed)
    known = {}

    def capacity(resource):
        return known.setdefault(resource, float(rates.integers(4, 40)))

    def uses(flow):
        for one in flow.transfers:
            ends = (str(one.source), str(one.destination))
            yield (*ends, str(one.executor))
            yield from (f"{end} {one.operation}" for end in ends)

    # All rates are drawn in one order, whatever is asked first.
    places = [*(f"G{i}" for i in range(4)), "C0", "C1", "N0"]
    for pair in itertools.permutations(places, 2):
        for executor in pair:
            capacity((*pair, executor))
    for place, operation in itertools.product(places, ("read", "write")):
        capacity(f"{place} {operation}")
    return SharedResources(uses, capacity)


def all_rings(space):
    first, *rest = space.gpus
    for order in itertools.permutations(rest):
        pairs = itertools.pairwise((first, *order, first))
        for hops in itertools.product(*(space.between(*pair) for pair in pairs)):
            yield ring(hops)


def best_rate(source, rings):
    return max(source.measure([ring_set([one]).flows])[0].rate_gbps for one in rings)


def all_chains(task, nic, gpus):
    """Every chain over these GPUs that the fork can set up, as rings through the world."""
    how = {"blocks": task.blocks, "fifo": Fifo(bytes=task.fifo_bytes)}
    space = task.hop_space(gpus)
    for order in itertools.permutations(gpus):
        first = [
            Hop(WORLD, order[0], entering(nic.index, order[0], through=node, **how))
            for node in throughs(task, nic, order[0])
        ]
        last = [
            Hop(order[-1], WORLD, leaving(order[-1], nic.index, through=node, **how))
            for node in throughs(task, nic, order[-1])
        ]
        choices = [space.between(*pair) for pair in itertools.pairwise(order)]
        for into, out, *hops in itertools.product(first, last, *choices):
            if len(gpus) > 1 or into.flow.transfers[1:] or out.flow.transfers[1:]:
                yield Ring((into, *hops, out))


# Against brute force


@pytest.mark.parametrize("per_switch", [0, 2])
@pytest.mark.parametrize("peers", [True, False])
def test_rings_of_a_toy_machine_are_the_best_of_all(peers, per_switch):
    machine = toy_machine(gpus=4, numa_nodes=2, per_switch=per_switch)
    knowledge = Knowledge(peer_access_default=peers)
    source = Simulator(model_for(machine, knowledge))
    task = task_of(machine, source, knowledge=knowledge)
    found = searched_rings(task)
    assert not found.missing_rings
    assert sorted(map(mask_of, found.rings)) == [m for m in range(16) if len(gpus_of(m)) > 1]
    for gpus, one in found.rings.items():
        best = best_rate(source, all_rings(task.hop_space(gpus)))
        assert tuple(sorted(one.ring.gpus)) == gpus
        assert one.rate_gbps == best_rate(source, [one.ring])
        assert one.rate_gbps >= best / 1.0101
        assert one.bound_gbps >= best / 1.0001


@pytest.mark.parametrize("seed", range(4))
def test_rings_of_a_machine_of_which_nothing_is_like_another_are_the_best(seed):
    machine = unlike(toy_machine(gpus=4, numa_nodes=2))
    source = random_resources(seed)
    task = task_of(machine, source)
    for gpus, one in searched_rings(task).rings.items():
        assert one.rate_gbps >= best_rate(source, all_rings(task.hop_space(gpus))) / 1.0101


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gdr", [True, False])
def test_chains_are_the_best_of_all(seed, gdr):
    machine = unlike(with_nics(toy_machine(gpus=3, numa_nodes=2), "C1", gdr=gdr))
    source = random_resources(seed)
    task = task_of(machine, source)
    (nic,) = machine.nics
    found = DatabaseSearch(task)
    found.find_chains(nic)
    assert not found.missing_chains
    assert set(found.chains) == set(task.sets_of_gpus(least=1))
    for gpus, one in found.chains.items():
        assert tuple(sorted(one.ring.gpus[1:])) == gpus
        assert one.rate_gbps == best_rate(source, [one.ring])
        assert one.rate_gbps >= best_rate(source, all_chains(task, nic, gpus)) / 1.0101
        assert gdr or {place.kind for place in one.landings} == {"C"}


def test_subsets_that_look_the_same_are_searched_once_and_each_is_measured():
    model = load_bundled(EIGHT)
    task = task_of(model.machine, Simulator(model), knowledge=model.knowledge)
    found = searched_rings(task)
    assert len(found.rings) == 247
    assert task.source.sets_measured <= 1000
    for gpus, one in found.rings.items():
        assert tuple(sorted(one.ring.gpus)) == gpus
        assert one.rate_gbps == best_rate(task.source, [one.ring])


class SlowGpu:
    """A source in which nothing that touches one GPU has more than a rate."""

    simulated = True

    def __init__(self, source, gpu, gbps):
        self.source, self.name, self.gbps = source, gpu, gbps

    def measure(self, sets):
        return [self._slowed(one) for one in self.source.measure(sets)]

    def _slowed(self, one):
        if f"G{self.name}-" not in f"{one.transfers} ".replace(" ", "- "):
            return one
        rows = tuple(tuple(min(rate, self.gbps) for rate in row) for row in one.samples_gbps)
        return msgspec.structs.replace(one, samples_gbps=rows)


def test_where_a_symmetry_does_not_hold_each_subset_is_searched_by_itself():
    machine = toy_machine(gpus=4, numa_nodes=2)
    source = SlowGpu(Simulator(model_for(machine)), 3, 1.0)
    found = searched_rings(task_of(machine, source))
    for gpus, one in found.rings.items():
        assert one.rate_gbps == best_rate(source, [one.ring])
        assert (one.rate_gbps == 1.0) == (3 in gpus)


# What the fork's runtime makes of a database


def ways_through(database, masks):
    """The rate of every ring over the nodes, by trying all chains that meet."""
    parts = {part.mask: part.chains for part in database.inter}
    for chains in itertools.product(*(parts.get(mask, ()) for mask in masks)):
        pairs = itertools.pairwise((*chains, chains[0]))
        if all(one.tail == other.head for one, other in pairs):
            yield min(chain.gbps for chain in chains)


@st.composite
def meeting_chains(draw):
    """Chains over GPU 0 and over GPU 1 between few crossings, so that many meet."""
    kinds = st.sampled_from(("GPU_GPU_INTER", "GPU_CPU_INTER", "CPU_GPU_INTER", "CPU_CPU_INTER"))
    crossings = st.builds(Crossing, kinds, st.integers(0, 1), st.integers(0, 1))
    pool = draw(st.lists(crossings, min_size=1, max_size=4, unique=True))
    parts = []
    for mask in (1, 2):
        ends = st.tuples(st.sampled_from(pool), st.sampled_from(pool))
        rates = draw(st.dictionaries(ends, st.integers(1, 9), max_size=8))
        chains = [
            NodeChain(head=head, tail=tail, gbps=float(rate), transfers=())
            for (head, tail), rate in rates.items()
        ]
        parts.append(NodeChains(mask=mask, chains=tuple(chains)))
    return Database(num_gpus=2, num_numa=2, num_bits=1, inter=tuple(parts))


@settings(max_examples=150)
@given(meeting_chains(), st.lists(st.sampled_from((1, 2)), min_size=2, max_size=4))
def test_the_solver_finds_what_trying_everything_finds(database, masks):
    rates = list(ways_through(database, masks))
    if not rates:
        with pytest.raises(SearchError, match="No ring found over"):
            found_ring(database, masks)
        return
    found = found_ring(database, masks)
    assert found.gbps == max(rates)
    assert [part.mask for part in found.nodes] == masks
    closed = [*found.nodes, found.nodes[0]]
    assert all(one.tail == other.head for one, other in itertools.pairwise(closed))
    listed = {
        (part.mask, one.head, one.tail): one.gbps for part in database.inter for one in part.chains
    }
    assert found.gbps == min(listed[part.mask, part.head, part.tail] for part in found.nodes)


def test_of_equal_rings_the_solver_takes_the_crossing_with_the_lowest_number():
    database = exported(PCIE)
    found = found_ring(database, [3, 3])
    between = {(one.head, one.tail): one for one in chains_of(database, 3)}
    assert len(between) == len(chains_of(database, 3))
    closed = {
        encoded(head, database.num_bits)
        for (head, tail), one in between.items()
        if (tail, head) in between and min(one.gbps, between[tail, head].gbps) == found.gbps
    }
    assert encoded(found.nodes[0].head, database.num_bits) == min(closed)


@pytest.mark.parametrize(
    "masks, sentence",
    [
        ([1], "TCCL does not handle single GPU communicators"),
        ([2, 1], "no chain over GPUs 1"),
        ([7], "No ring found over GPUs 0, 1, 2: the database has none"),
    ],
)
def test_the_solver_says_where_the_runtime_stops(masks, sentence):
    with pytest.raises(SearchError) as caught:
        found_ring(small_database(), masks)
    assert sentence in str(caught.value)


# Whole machines


@functools.cache
def made(name):
    return make_database(plan_of(name), Simulator(load_bundled(name)))


def exported(name):
    return read(made(name))


def chains_of(database, mask):
    return next(part.chains for part in database.inter if part.mask == mask)


def test_every_set_of_gpus_of_a_machine_has_its_ring_and_its_chains():
    database = check_database(exported(PCIE))
    assert (database.num_gpus, database.num_numa, database.num_bits) == (4, 4, 2)
    assert [one.mask for one in database.intra] == [m for m in range(16) if len(gpus_of(m)) > 1]
    assert [part.mask for part in database.inter] == list(range(1, 16))
    # Each set's best chain, with every landing of all best chains before and behind it.
    entries, exits = (
        len({side(one) for part in database.inter for one in part.chains})
        for side in (
            lambda one: (one.head.destination, one.head.type[4:7]),
            lambda one: (one.tail.source, one.tail.type[:3]),
        )
    )
    assert all(len(part.chains) == entries * exits for part in database.inter)


def test_a_ring_over_nodes_has_the_rate_of_the_worst_of_each_nodes_best_chains():
    database = exported(PCIE)
    for masks in [(15, 15), (1, 2), (8, 15, 1), (3, 12), (5, 5, 10), (7, 14), (4, 4), (9, 6, 15)]:
        best = min(max(one.gbps for one in chains_of(database, mask)) for mask in masks)
        assert found_ring(database, masks).gbps == best


def test_a_free_choice_of_mechanisms_is_faster_than_variables_and_no_faster_than_placement():
    found, plan = found_ring(exported(PCIE), [15]), plan_of(PCIE)
    assert found.gbps >= 2 * plan.variables.rate_gbps
    assert found.gbps == pytest.approx(plan.rate_gbps)


@pytest.mark.parametrize("name", [PCIE, "amd-v100", "intel-v100", SMALL, EIGHT])
def test_the_runtime_takes_the_plans_ring_unless_another_is_better(name):
    plan, source = plan_of(name), Simulator(load_bundled(name))
    database = read(make_database(plan, source, subsets=(plan.gpus,)))
    found = found_ring(database, [mask_of(plan.gpus)])
    numa = numa_ids(plan.machine)
    blocks = min(plan_channels(plan), MOST_CHANNELS)
    planned = {}
    for one in plan.rings:
        flows = [Flow(flow.transfers, blocks, flow.fifo) for flow in flows_of(one)]
        rate = source.measure([transfer_set(flows)])[0].rate_gbps
        planned[tuple(t for flow in flows for t in moved(flow.transfers, numa))] = rate
    if found.nodes[0].transfers in planned:
        assert found.gbps == pytest.approx(planned[found.nodes[0].transfers], rel=1e-5)
    else:
        assert found.gbps > 1.01 * max(planned.values())


def test_with_no_sets_left_to_measure_the_plans_ring_is_exported_as_it_is():
    plan = plan_of(PCIE)
    source = Simulator(load_bundled(PCIE))
    found = make_database(plan, source, subsets=(plan.gpus,), max_sets=1)
    (planned,) = plan.rings
    wanted = tuple(
        t for flow in flows_of(planned) for t in moved(flow.transfers, numa_ids(plan.machine))
    )
    (part,) = found_ring(read(found), [15]).nodes
    assert (part.gpus, part.transfers) == (planned.gpus, wanted)
    assert any("1 of 1 rings are not proven best" in note for note in found.notes)


def read(found):
    """What the fork's reader makes of a file."""
    return parse_tccl_xml(found.text)


def moved(transfers, numa):
    """The fork's transfers for these."""

    def index(place):
        return numa[place.index] if place.kind == "C" else place.index

    return tuple(
        TypedTransfer(typed(one), index(one.source), index(one.destination)) for one in transfers
    )


def flows_of(planned):
    return [one.flow for one in planned.hops]


def test_eight_gpus_and_two_nics_take_few_sets():
    model = load_bundled(EIGHT)
    machine = with_nics(model.machine, "C0", "C1")
    source = Simulator(msgspec.structs.replace(model, machine=machine))
    plan = with_parts(plan_of(EIGHT), machine=machine)
    found = make_database(plan, source)
    assert found.sets_measured <= 5000
    assert len(read(found).intra) == 247
    assert [part.mask for part in read(found).inter] == list(range(1, 256))
    assert any("NCCL_IB_HCA=mlx5_0" in note for note in found.notes)
    assert any("takes 3.6 GiB in every process" in note for note in found.notes)
    nodes = found_ring(read(found), [255, 15, 128, 255])
    assert 0 < nodes.gbps <= 12.5
    other = make_database(plan, source, subsets=(), nic=1)
    assert any("NCCL_IB_HCA=mlx5_1" in note for note in other.notes)
    assert [part.mask for part in read(other).inter] == [255]


# What is lost, and what is refused


@functools.cache
def nine_gpus():
    """The plan and the model of a machine of 9 GPUs and a NIC."""
    machine = with_nics(toy_machine(gpus=9), "C0")
    model = model_for(machine)
    budget = Budget(sets=20, idle_sets=5)
    return make_plan(machine, Knowledge(), Simulator(model), budget=budget, ring_counts=(1,)), model


def test_above_eight_gpus_only_what_is_asked_for_is_there():
    plan, model = nine_gpus()
    subsets = ((0, 1, 2, 3), (4, 8))
    found = make_database(plan, Simulator(model), subsets=subsets, max_sets=60)
    assert [one.mask for one in read(found).intra] == [15, 1 << 4 | 1 << 8, 2**9 - 1]
    assert any(note.startswith("499 of the 502 sets") for note in found.notes)


def test_more_gpus_than_the_forks_table_of_chains_has_room_for_have_none():
    plan, model = nine_gpus()
    found = read(make_database(plan, Simulator(model), max_sets=60))
    assert (found.inter, found.num_gpus, found.num_bits) == ((), 9, 1)
    notes = make_database(plan, Simulator(model), max_sets=60).notes
    assert any("up to 8 the fork's table" in note for note in notes)


class NoNetwork:
    """A source that measures nothing over a NIC, as one machine's profiler."""

    simulated = False

    def __init__(self, source):
        self.source = source

    def measure(self, sets):
        if any(flow.is_network for one in sets for flow in one.flows):
            raise MeasurementError("N0: no machine at its other end")
        answers = self.source.measure(sets)
        return [msgspec.structs.replace(one, simulated=False) for one in answers]


def test_where_no_flow_over_the_network_can_be_measured_there_are_rings_only():
    found = make_database(plan_of(SMALL), NoNetwork(Simulator(load_bundled(SMALL))))
    assert len(read(found).intra) == 11
    assert read(found).inter == ()
    assert any("N0: no machine at its other" in note for note in found.notes)


class OnlySome(NoNetwork):
    """A source that cannot measure what touches GPU 2."""

    def measure(self, sets):
        if any("G2" in str(one) for one in sets):
            raise MeasurementError("G2: lost")
        return self.source.measure(sets)


def test_a_set_of_gpus_without_a_ring_is_left_out_by_name():
    found = make_database(plan_of(SMALL), OnlySome(Simulator(load_bundled(SMALL))))
    assert all(not one.mask & 4 for one in read(found).intra)
    for kind in ("ring", "chain"):
        assert any(
            note.startswith(f"no {kind} over GPUs 0, 1, 2, 3,") and note.endswith("G2: lost")
            for note in found.notes
        )
    assert any("no ring over 4 more sets" in note for note in found.notes)


def test_several_rings_become_one_and_many_channels_fewer():
    several = make_database(plan_of(EIGHT), Simulator(load_bundled(EIGHT)), subsets=())
    plan = plan_of(EIGHT)
    together = f"those of {len(plan.rings)} rings and"
    assert any(together in note for note in several.notes) == (len(plan.rings) > 1)
    fewer = made(SMALL)
    assert any("room for 15 channels" in note for note in fewer.notes)
    assert all(not one.mask & 8 or one.mask < 16 for one in read(fewer).intra)


def test_a_plan_for_some_gpus_keeps_their_nvml_indices():
    plan = plan_of(PCIE, gpus=(1, 3))
    database = read(make_database(plan, Simulator(load_bundled(PCIE))))
    assert database.num_gpus == 4
    assert [one.mask for one in database.intra] == [10]
    assert [part.mask for part in database.inter] == [2, 8, 10]


def test_numa_nodes_go_by_the_systems_numbers():
    machine = toy_machine(gpus=2, numa_nodes=2)
    odd = [msgspec.structs.replace(n, numa_id=8 * n.index) for n in machine.numa_nodes]
    assert numa_ids(msgspec.structs.replace(machine, numa_nodes=tuple(odd))) == {0: 0, 1: 8}
    unknown = [msgspec.structs.replace(n, numa_id=-1) for n in machine.numa_nodes]
    assert numa_ids(msgspec.structs.replace(machine, numa_nodes=tuple(unknown))) == {0: 0, 1: 1}


@pytest.mark.parametrize(
    "export, sentence",
    [
        ({"subsets": ((0, 7),)}, "GPU 7: is not in the plan"),
        ({"nic": 3}, "NIC 3: is not in machine"),
    ],
)
def test_what_the_plan_does_not_have_is_refused(export, sentence):
    with pytest.raises(InputError) as caught:
        make_database(plan_of(PCIE), Simulator(load_bundled(PCIE)), **export)
    assert sentence in str(caught.value)


def test_an_index_that_the_forks_table_cannot_hold_is_refused():
    machine = toy_machine(gpus=24)
    source = Simulator(model_for(machine))
    budget = Budget(sets=5, idle_sets=2)
    plan = make_plan(machine, Knowledge(), source, gpus=(0, 23), budget=budget)
    with pytest.raises(InputError) as caught:
        make_database(plan, source)
    assert (caught.value.where, caught.value.right[:8]) == ("GPU 23", "0 to 21:")
