"""The TCCL fork's file: what the fork's reader and runtime make of plans' rings and chains."""

import functools
import itertools
import re
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError, SearchError
from tccl_py.model.cluster import gpus_text
from tccl_py.model.machine import Knowledge
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.model.transfer import parse_flow
from tccl_py.nccl.settings import Settings
from tccl_py.plan.chains import PlanChain, PlanHop
from tccl_py.plan.tables import ClassRates
from tccl_py.planning.planner import make_cluster_plan, make_plan
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled, load_machine, model_for
from tccl_py.simulator.source import Simulator
from tccl_py.tccl_fork import (
    chains_of,
    comment,
    fork_file,
    index_bits,
    mask_of,
    numa_ids,
    table_bytes,
    type_transfer,
)
from tests.nccl_cases import CASES
from tests.networked import networked_machine
from tests.planned import ASUS, PCIE, SMALL, plan_of
from tests.tccl_databases import (
    Crossing,
    Database,
    NodeChain,
    NodeChains,
    TypedTransfer,
    gpus_of,
    small_database,
)
from tests.tccl_runtime import found_ring, parse_tccl_xml
from tests.test_cli_plan import done, tccl
from tests.toy import toy_machine

EIGHT = "supermicro-h12dsg-8x3090"
"""8 GPUs that cannot access each other, on 2 NUMA nodes; no NIC."""


@functools.cache
def made(name):
    return fork_file(plan_of(name))


def exported(name):
    return parse_tccl_xml(made(name).text)


def moved(flows, numa):
    """The fork's transfers for these flows."""

    def index(place):
        return numa[place.index] if place.kind == "C" else place.index

    return tuple(
        TypedTransfer(type_transfer(one), index(one.source), index(one.destination))
        for flow in flows
        for one in flow.transfers
    )


# Rings of a plan


@pytest.mark.parametrize("name", [PCIE, "amd-v100", "intel-v100", SMALL, EIGHT, ASUS])
def test_the_runtime_takes_the_plans_fastest_ring_as_it_is(name):
    plan = plan_of(name)
    ring = max(plan.rings, key=lambda ring: ring.rate_gbps)
    found = found_ring(exported(name), [mask_of(plan.gpus)])
    assert found.gbps == pytest.approx(ring.rate_gbps, rel=1e-5)
    (part,) = found.nodes
    assert part.gpus == ring.gpus
    assert part.transfers == moved((hop.flow for hop in ring.hops), numa_ids(plan.machine))


@pytest.mark.parametrize("name", [PCIE, SMALL, EIGHT])
def test_every_set_of_gpus_with_rings_in_the_plan_has_its_first_ring(name):
    plan, database = plan_of(name), exported(name)
    assert database.inter == ()
    masks = sorted(mask_of(one.gpus) for one in (plan, *plan.subsets))
    assert [ring.mask for ring in database.intra] == masks
    for subset in plan.subsets:
        found = found_ring(database, [mask_of(subset.gpus)])
        gpus = found.nodes[0].gpus
        assert subset.rings[0] in {(*gpus[at:], *gpus[:at]) for at in range(len(gpus))}
        assert found.gbps == pytest.approx(subset.rate_gbps / len(subset.rings), rel=1e-5)


def test_a_smaller_ring_bounces_through_the_numa_nodes_of_the_plan():
    plan = plan_of(PCIE)
    assert plan.settings.shm_placement
    for ring in exported(PCIE).intra:
        nodes = dict(zip(gpus_of(ring.mask), plan.subset(gpus_of(ring.mask)).nodes, strict=True))
        ids = numa_ids(plan.machine)
        written = {t.source: t.destination for t in ring.transfers if "WRITE_CPUMEM" in t.type}
        assert written == {gpu: ids[nodes[gpu]] for gpu in written}


def test_a_plan_without_smaller_rings_names_the_sets_that_fail():
    plan = msgspec.structs.replace(plan_of(PCIE), subsets=())
    found = fork_file(plan)
    assert [ring.mask for ring in parse_tccl_xml(found.text).intra] == [15]
    assert any("no ring over 10 of the 11 sets" in note for note in found.notes)


def test_all_sets_of_one_host_are_searched_where_that_is_asked(tmp_path):
    few = ["--max-sets", "200", "--gpus-per-job", "all"]
    done("plan", tmp_path / "plan", "--simulate", SMALL, *few)
    result = done("export", tmp_path / "plan", "--runtime", "tccl")
    assert len(parse_tccl_xml(result.stdout).intra) == 11
    assert "sets of GPUs that jobs can have" not in result.stderr
    counts = tccl("plan", tmp_path / "other", "--simulate", SMALL, "--gpus-per-job", "2")
    assert counts.exit_code == 2


def test_several_rings_become_one_and_many_channels_fewer():
    plan = plan_of(ASUS)
    together = f"those of {len(plan.rings)} rings and"
    assert len(plan.rings) > 1 and any(together in note for note in made(ASUS).notes)
    assert any("room for 15 channels" in note for note in made(SMALL).notes)
    assert "NCCL_MIN_NCHANNELS=15" in made(SMALL).notes[0]


def test_a_plan_for_some_gpus_keeps_their_nvml_indices():
    database = parse_tccl_xml(fork_file(plan_of(PCIE, gpus=(1, 3))).text)
    assert database.num_gpus == 4
    assert [one.mask for one in database.intra] == [10]


def test_numa_nodes_go_by_the_systems_numbers():
    machine = toy_machine(gpus=2, numa_nodes=2)
    odd = [msgspec.structs.replace(n, numa_id=8 * n.index) for n in machine.numa_nodes]
    assert numa_ids(msgspec.structs.replace(machine, numa_nodes=tuple(odd))) == {0: 0, 1: 8}
    unknown = [msgspec.structs.replace(n, numa_id=-1) for n in machine.numa_nodes]
    assert numa_ids(msgspec.structs.replace(machine, numa_nodes=tuple(unknown))) == {0: 0, 1: 1}


def test_an_index_that_makes_the_forks_table_useless_is_refused():
    machine = toy_machine(gpus=24)
    budget = Budget(sets=5, idle_sets=2)
    source = Simulator(model_for(machine))
    plan = make_plan(machine, Knowledge(), source, gpus=(0, 23), budget=budget)
    with pytest.raises(InputError) as caught:
        fork_file(plan)
    assert (caught.value.where, caught.value.what[:11]) == ("GPU 23", "is too high")


# Chains of tables


class Table:
    """A table with these chains."""

    def __init__(self, gpus, *chains, buffsize=4 << 20, numa_nodes=2):
        machine = networked_machine(gpus=2, nics=2, numa_nodes=numa_nodes)
        self.node_class = SimpleNamespace(machine=machine, knowledge=Knowledge())
        self.gpus, self.chains = gpus, chains
        self.settings = Settings(buffsize=buffsize)

    def all_chains(self):
        return ((self.settings, chain) for chain in self.chains)


def chain(*flows, nics=(0, 0), gbps=10.0):
    parsed = [parse_flow(flow) for flow in flows]
    ends = [(flow.source.index, flow.destination.index) for flow in parsed]
    ends[0], ends[-1] = (-1, ends[0][1]), (ends[-1][0], -1)
    hops = [
        PlanHop(source=source, target=target, flow=flow, rate_gbps=gbps)
        for (source, target), flow in zip(ends, parsed, strict=True)
    ]
    return PlanChain(hops=tuple(hops), entry_nic=nics[0], exit_nic=nics[1])


INTO, OUT = "N0->N0->C0->G0->G0", "G1->G1->C1->N0->N0"


def test_the_fastest_chain_of_the_means_with_most_sets_is_taken():
    slow = chain(INTO, "G0->G0->G1", OUT, gbps=5.0)
    fast = chain(INTO, "G0->G1->G1", OUT, gbps=6.0)
    alone = chain(INTO, "G0->G0->C0->N0->N0")
    tables = [Table((0, 1), slow, fast), Table((0,), alone)]
    tables.append(Table((0, 1), chain(INTO, "G0->G0->G1", OUT, gbps=50.0), buffsize=1 << 20))
    found = chains_of(tables)
    assert [(path.gpus, path.rate_gbps) for path in found.chains] == [((0, 1), 6.0), ((0,), 10.0)]
    assert (found.nic, found.blocks, found.fifo_bytes) == (0, 1, 4 << 20)
    assert [type_transfer(transfer) for transfer in found.chains[0].transfers] == [
        *("GPU_READ_CPUMEM_KERNEL", "GPU_READ_GPUMEM_KERNEL", "GPU_WRITE_CPUMEM_KERNEL")
    ]
    assert [str(place) for place in found.chains[0].ends] == ["C0", "C1"]


@pytest.mark.parametrize(
    "refused",
    [
        chain(INTO, "G0->G0->G1", OUT, nics=(0, 1)),
        chain(INTO, "G0->D1->G1", OUT),
        chain("N0->N0->G0", "G0->N0->N0"),
        chain("N0->N0->G0", "G0->G0->G1", "G1->G1->G0->N0->N0"),
    ],
)
def test_a_chain_that_the_fork_cannot_set_up_is_left_out(refused):
    with pytest.raises(InputError, match="no chain that the fork can have"):
        chains_of([Table((0, 1), refused)])


@functools.cache
def cluster_of_four(kind, asked=None):
    """The file of a plan over four hosts, and its notes."""
    path = CASES / "clusters" / "nvl4_2rails.xml"
    model = load_bundled("amd-v100") if kind == "amd-v100" else load_machine(path, p2p=True)
    machine = model.machine
    if kind == "gpu direct":
        # One NIC fills and empties the memory of the lowest two GPUs: alone they copy nothing.
        machine = msgspec.structs.replace(machine, nics=machine.nics[:1])
        model = model_for(machine, model.knowledge)
    reports = [HostReport(host=h, machine=machine, knowledge=model.knowledge) for h in "abcd"]
    tables = []
    plan = make_cluster_plan(
        cluster_of(reports),
        [Simulator(model)],
        budget=Budget(sets=60, idle_sets=10),
        gpus_per_job=asked,
        tables=tables,
    )
    host = plan.cluster.classes[0]
    return fork_file(plan, [ClassRates(host, table) for table in tables])


@pytest.mark.parametrize("kind", ["amd-v100", "two NICs", "gpu direct"])
def test_with_all_sets_searched_every_set_has_one_ring_on_one_two_and_four_hosts(kind):
    made = cluster_of_four(kind, "all")
    database = parse_tccl_xml(made.text)
    assert not any("sets of GPUs that jobs can have" in note for note in made.notes)
    for mask in range(1, 16):
        for hosts in (1, 2, 4):
            if hosts == 1 and len(gpus_of(mask)) == 1:
                continue
            found = found_ring(database, [mask] * hosts)
            assert len(found.nodes) == hosts and found.gbps > 0
            assert all(sorted(part.gpus) == list(gpus_of(mask)) for part in found.nodes)


def test_sets_that_were_not_searched_are_named():
    made = cluster_of_four("amd-v100")
    database = parse_tccl_xml(made.text)
    chains = {gpus_of(part.mask) for part in database.inter}
    sets = {gpus for n in range(1, 5) for gpus in itertools.combinations(range(4), n)}
    missing = ", ".join(map(gpus_text, sorted(sets - chains, key=lambda gpus: (len(gpus), gpus))))
    (note,) = (note for note in made.notes if "no chain over" in note)
    assert f"{len(sets - chains)} of the 15 sets" in note and f"({missing})" in note
    assert "--gpus-per-job all" in note
    assert any("no ring inside a node over 11 of the 11" in note for note in made.notes)


def test_sets_of_a_table_have_the_rates_of_the_sets_that_symmetry_maps_to_them():
    into, out = "N0->N0->C0->G0->G0", "G0->G0->C0->N0->N0"
    database = chains_of([Table((0,), chain(into, out), numa_nodes=1)])
    assert {path.gpus for path in database.chains} == {(0,), (1,)}
    (image,) = (path for path in database.chains if path.gpus == (1,))
    assert image.rate_gbps == 10.0 and {t.executor.index for t in image.transfers} == {1}


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


# The text


@given(st.text(max_size=60))
def test_a_note_never_ends_its_comment(note):
    # The fork's parser stops at the first two hyphens, and wants the end of the comment there.
    assert re.fullmatch(r"<!-- ((?!--).)* -->", f"<!-- {comment(f'a{note}')} -->")


@pytest.mark.parametrize(
    "flow, types",
    [
        ("G0->G0->G1", ["GPU_WRITE_GPUMEM_KERNEL"]),
        ("G0->G1->G1", ["GPU_READ_GPUMEM_KERNEL"]),
        ("G0->D0->G1", ["GPU_WRITE_GPUMEM_MEMCPY"]),
        ("G0->D1->G1", ["GPU_READ_GPUMEM_MEMCPY"]),
        (
            "G0->G0->C1->G1->G1{blocks=4}",
            ["GPU_WRITE_CPUMEM_KERNEL", "GPU_READ_CPUMEM_KERNEL"],
        ),
        (
            "G0->D0->C1->D1->G1",
            ["GPU_WRITE_CPUMEM_MEMCPY", "GPU_READ_CPUMEM_MEMCPY"],
        ),
        ("C1->G0->G0", ["GPU_READ_CPUMEM_KERNEL"]),
    ],
)
def test_flows_become_typed_transfers(flow, types):
    assert [type_transfer(one) for one in parse_flow(flow).transfers] == types


@pytest.mark.parametrize("flow", ["G0->N0->N0", "h0.G0->h0.G0->h0.G1"])
def test_flows_that_leave_the_node_have_no_type(flow):
    with pytest.raises(InputError, match=r"that the TCCL fork has"):
        type_transfer(parse_flow(flow).transfers[0])


def test_bits_and_the_size_of_the_forks_table():
    assert [index_bits(*counts) for counts in [(1, 1), (2, 1), (4, 4), (4, 5), (8, 2)]] == [
        *(1, 1, 2, 3, 3)
    ]
    assert table_bytes(4, 2) < 16 * 2**20
    assert 3 * 2**30 < table_bytes(8, 3) < 5 * 2**30
