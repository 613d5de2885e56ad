"""The search over settings: NCCL's own choice is its floor, and interruptions keep the best."""

import random
from itertools import pairwise, permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.model.machine import Knowledge, NvLink
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.plan.chains import condense
from tccl_py.planning.planner import bare_copies
from tccl_py.planning.request import PlanRequest
from tccl_py.planning.settings_search import (
    CAREFUL,
    as_graph,
    measured_well,
    mechanisms,
    rate_own,
    settings_search,
)
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled, model_for
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tests.fakes import scaled
from tests.networked import networked_machine
from tests.planned import FOUR_GPUS, PCIE, SEVERAL_GPUS, SMALL, task_on
from tests.toy import toy_machine


class Interrupted(Bench):
    """A source during whose n-th measurement the user presses Ctrl-C."""

    def __init__(self, at):
        super().__init__(Simulator(load_bundled(PCIE)))
        self.at, self.asked = at, 0

    def measure(self, sets):
        self.asked += 1
        if self.asked == self.at:
            raise KeyboardInterrupt
        return super().measure(sets)


def task_for(name, *, source=None, version="2.30", counts=(1, 2)):
    model, budget = load_bundled(name), Budget(sets=200, idle_sets=50)
    source, request = source or Bench(Simulator(model)), PlanRequest(version=version)
    host = model.machine, model.knowledge
    return task_on(*host, source, request=request, ring_counts=counts, budget=budget)


def searched(task):
    search = settings_search(task)
    return search.own["variables"], search


@pytest.mark.parametrize("name", FOUR_GPUS)
@pytest.mark.parametrize("version", ["2.18", "2.30"])
def test_the_best_settings_can_be_set_and_are_no_worse_than_any_that_were_searched(name, version):
    stock, search = searched(task_for(name, version=version))
    check_settings(search.best.settings)
    assert search.best.settings.version == version
    assert search.best.rate_gbps >= stock.rate_gbps
    assert search.searched
    assert not search.cancelled
    for other in search.searched:
        check_settings(other.settings)
        assert search.best.rate_gbps * 1.0101 >= other.rate_gbps


@pytest.mark.parametrize("name", FOUR_GPUS)
def test_the_rate_of_every_choice_is_measured_under_its_own_settings(name):
    task = task_for(name)
    _, search = searched(task)
    for choice in [search.best, *search.searched]:
        rings = task.rings_under(choice.settings, choice.orders)
        (measured,) = task.source.measure([rings.flows])
        assert choice.rate_gbps == pytest.approx(len(choice.orders) * measured.rate_gbps)


@pytest.mark.parametrize("at", [2, 5, 12, 20, 40, 60, 80])
def test_an_interruption_keeps_the_best_so_far_and_measures_no_more(at):
    source = Interrupted(at)
    variables, search = searched(task_for(PCIE, source=source))
    assert search.cancelled and source.asked == at
    assert search.best.rate_gbps >= variables.rate_gbps >= search.own["default"].rate_gbps > 0
    assert all(choice.rate_gbps > 0 for choice in search.searched)


def test_an_interruption_before_anything_is_known_goes_to_the_caller():
    with pytest.raises(KeyboardInterrupt):
        searched(task_for(PCIE, source=Interrupted(1)))


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_choices_without_a_graph_file_run_the_rings_that_nccl_picks(name):
    task = task_for(name)
    for own in rate_own(task).own.values():
        assert own.measurement.simulated
        assert {one.gpus for one in own.rings.rings} <= {
            tuple(ring[(i + ring.index(min(ring))) % len(ring)] for i in range(len(ring)))
            for ring in own.nccl.rings
        }
        graph = as_graph(own)
        assert graph.settings.channels % len(own.rings.rings) == 0
        # The file's channels move the same flows: it needs no other measurement.
        assert task.rings_under(graph.settings, graph.orders).flows == own.rings.flows


def test_the_same_settings_are_searched_the_same_way_again():
    task = task_for(PCIE)
    _, first = searched(task)
    measured = task.source.sets_measured
    _, again = searched(task)
    assert task.source.sets_measured == measured
    assert [one.settings for one in again.searched] == [one.settings for one in first.searched]
    assert again.best.rings == first.best.rings


def test_ring_counts_that_do_not_divide_the_channels_are_left_out():
    task = task_for(SMALL, counts=(1, 2, 3))
    result = task.search(Settings(channels=4), floor=0.0, sets=100)
    assert len(result.rings.rings) in (1, 2)


def test_a_noisy_ring_set_is_measured_several_times_and_a_quiet_one_once():
    model = load_bundled(SMALL)
    for noise, measured in ((0.0, 1), (0.05, CAREFUL)):
        source = Bench(Simulator(model, noise=noise))
        task = task_for(SMALL, source=source)
        rings = task.rings_under(Settings(channels=4), [task.gpus])
        well = measured_well(source, rings)
        assert (source.times_measured, source.sets_measured) == (measured, 1)
        (exact,) = Simulator(model).measure([rings.flows])
        assert well.rate_gbps == pytest.approx(exact.rate_gbps, rel=0.03)


class Hardware(Bench):
    """A noisy simulation that passes for hardware, which says whether it is as precise as asked."""

    def __init__(self, source, *, settled):
        super().__init__(source)
        self.settled = settled

    def _measure(self, transfers):
        found = super()._measure(transfers)
        return msgspec.structs.replace(found, simulated=False, settled=self.settled)


@pytest.mark.parametrize(("settled", "measured"), [(True, 1), (False, CAREFUL)])
def test_hardware_that_is_as_precise_as_asked_measures_once(settled, measured):
    source = Hardware(Simulator(load_bundled(SMALL), noise=0.05), settled=settled)
    task = task_for(SMALL, source=source)
    rings = task.rings_under(Settings(channels=4), [task.gpus])
    assert measured_well(source, rings).settled is settled
    assert source.times_measured == measured


ORDERS = st.sampled_from([(0, 1, 2), (0, 2, 1)])


@given(st.lists(ORDERS, min_size=1, max_size=16))
def test_condensed_rings_keep_their_shares(orders):
    short = condense(orders)
    times = len(orders) // len(short)
    assert sorted(short * times) == sorted(orders)


@pytest.mark.parametrize("name", SEVERAL_GPUS)
def test_where_orders_are_alike_no_order_and_no_second_ring_is_faster(name):
    task = task_for(name)
    for settings in mechanisms(task):
        if not task.orders_alike(settings):
            continue
        chance = random.Random(0)
        orders = [tuple(chance.sample(task.gpus, len(task.gpus))) for _ in range(12)]
        sets = [(order,) for order in orders] + list(pairwise(orders))
        rings = [task.rings_under(settings, orders) for orders in sets]
        rates = [ring.rate(task.source.measure([ring.flows])[0]) for ring in rings]
        assert max(rates) <= min(rates[:12]) * (1 + 1e-9)


def test_orders_are_alike_behind_switches_and_where_the_machine_exchanges_all_gpus():
    alike = {
        name: [task.orders_alike(settings) for settings in mechanisms(task)]
        for name in SEVERAL_GPUS
        for task in [task_for(name)]
    }
    assert all(alike["h200x4-vm"])
    # Direct over NVSwitches, or bounced on two NUMA nodes.
    assert alike["nvswitch-8gpu-8nic"][0]
    assert not all(alike["nvswitch-8gpu-8nic"])
    assert not any(alike["asus-esc8000a-e13p"])
    # NVLinks join pairs of GPUs.
    assert not alike["amd-v100"][0]


@pytest.mark.parametrize(("nodes", "alike"), [(1, True), (4, False)])
def test_orders_over_links_between_numa_nodes_are_not_alike(nodes, alike):
    """A ring and its reverse use different directions of these links."""
    machine = toy_machine(gpus=4, numa_nodes=nodes)
    source = Bench(Simulator(model_for(machine)))
    task = task_on(machine, Knowledge(), source)
    assert task.symmetry.order == 24
    assert task.orders_alike(Settings(version="2.30", p2p_level="LOC")) == alike


class LamePair:
    """Measures a machine that is described as symmetric, with one pair of GPUs at half speed."""

    simulated = True

    def __init__(self, factor):
        self.factor, self.sizes = factor, set()
        self._simulator = Simulator(load_bundled(SMALL))

    def measure(self, sets):
        return [self._lamed(answer) for answer in self._simulator.measure(sets)]

    def _lamed(self, answer):
        self.sizes.add(len(answer.transfers))
        slow = any(str(flow).startswith("G0->G0->G1") for flow in answer.transfers.flows)
        return scaled(answer, self.factor if slow else 1.0)


@pytest.mark.parametrize(("factor", "differ"), [(1.0, False), (0.5, True)])
def test_sets_of_two_rings_are_searched_only_where_orders_turn_out_to_differ(factor, differ):
    source = LamePair(factor)
    task = msgspec.structs.replace(task_for(SMALL, source=Bench(source)), fewest_first=True)
    result = task.search(mechanisms(task)[0], floor=0.0, sets=200, check_bound=True)
    assert result.symmetric != differ
    assert (2 * len(task.gpus) in source.sizes) == differ


@pytest.mark.parametrize("channels", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", [PCIE, SMALL])
def test_rings_of_a_set_share_the_channels_that_one_ring_has(name, channels):
    """Each hop of k rings has the k-th part of the blocks, in the search as in a plan's rings."""
    task = task_for(name)
    settings = Settings(channels=channels, p2p_level="SYS")
    counts = [count for count in (1, 2, 4, 8) if channels % count == 0]
    problem = task.problem(settings, counts)
    for count in counts:
        blocks = {hop.flow.blocks for hop in problem.spaces[count]}
        assert blocks == {2 * channels // count}
        order = tuple(task.gpus)
        asked = task.rings_under(settings, [order, order[::-1]] * (count // 2) or [order])
        assert {flow.blocks for flow in asked.flows.flows} == blocks
        for engine in (True, False):
            # Copies of a bounce go through as much memory as its FIFOs are.
            sizes = {flow.buffer for flow in bare_copies(asked, copy_engine=engine).flows}
            bounces = {flow.fifo for flow in asked.flows.flows if flow.is_bounce}
            assert sizes == {max(blocks) * fifo.bytes for fifo in bounces} or sizes == {None}
        (answer,) = task.source.measure([asked.flows])
        assert asked.rate(answer) == len(asked.rings) * min(answer.gbps)
    searched = []
    told = msgspec.structs.replace(
        task, ring_counts=(1, 2, 4, 8, 16), request=PlanRequest(reporter=searched.append)
    )
    result = told.search(settings, floor=0.0, sets=30)
    assert {one.rings_in_set for one in searched} <= {c for c in (1, 2, 4, 8, 16) if c <= channels}
    rings = result.rings.rings
    assert {flow.blocks for flow in result.rings.flows.flows} == {2 * channels // len(rings)}


@pytest.mark.parametrize("mbps", [[25_000], [40_000], [50_000], [25_000, 25_000], [200_000]])
def test_a_slow_network_gets_no_more_channels_than_it_keeps_busy(mbps):
    machine = networked_machine(gpus=2, nics=len(mbps), mbps=mbps[0])
    source = Bench(Simulator(model_for(machine)))
    task = task_on(machine, Knowledge(), source, nics=tuple(range(len(mbps))))
    assert {kind.channels for kind in mechanisms(task)} == {2 if sum(mbps) < 50_000 else 8}


@pytest.mark.parametrize("counts", [(2, 2), (4, 1), (0, 0)])
def test_links_that_join_two_gpus_make_orders_unlike_and_switches_do_not(counts):
    near, far = counts
    machine = toy_machine(gpus=4, per_switch=4)
    links = tuple(
        NvLink(source=f"G{a}", target=f"G{b}", count=count)
        for a, b in permutations(range(4), 2)
        if (count := near if abs(a - b) % 2 else far)
    )
    machine = msgspec.structs.replace(machine, nvlinks=links)
    task = task_on(machine, Knowledge(), task_for(SMALL).source)
    assert task.orders_alike(Settings(version="2.30", p2p_level="SYS")) == (near == 0)
    assert task_for(SMALL).orders_alike(Settings(version="2.30"))
