"""Chain tables of a plan: they answer as searches did, and measure nothing."""

import itertools

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_line
from tccl_py.model.cluster import Cluster, Host
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.model.symmetry import automorphisms, relabel
from tccl_py.model.transfer import parse_set, transfer_set
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import check_plan, load_plan
from tccl_py.plan.tables import (
    ClassRates,
    KeptTable,
    read_tables,
    table_files,
)
from tccl_py.planning.jobs import image_of
from tccl_py.planning.join import plan_over
from tccl_py.planning.parts import job_gpus
from tccl_py.planning.planner import make_cluster_plan
from tccl_py.planning.request import PlanRequest
from tccl_py.search.problem import Budget
from tests.networked import MadeUp, networked_machine

EXACT = Budget(sets=None, idle_sets=15)
KINDS = [(2, 1), (2, 2), (3, 1), (1, 1)]


def machine_of(kind):
    gpus, nics = kind
    return networked_machine(gpus=gpus, nics=nics, numa_nodes=2, name=f"box{gpus}{nics}")


def cluster_with(kinds, rails="any"):
    reports = [
        HostReport(host=f"h{number}", machine=machine_of(kind)) for number, kind in enumerate(kinds)
    ]
    return cluster_of(reports, rails=rails, where="test")


def sources_for(cluster, seed):
    """A source for each class: equal classes of different clusters have equal rates."""
    return [MadeUp(seed + KINDS.index(kind_of(one))) for one in cluster.classes]


def kind_of(one):
    return len(one.machine.gpus), len(one.machine.nics)


def planned(cluster, seed, **more):
    tables = []
    plan = make_cluster_plan(
        cluster,
        sources_for(cluster, seed),
        ring_counts=(1,),
        budget=EXACT,
        tables=tables,
        gpus_per_job="1",
        **more,
    )
    return plan, [decode_json(encode_line(one).decode(), KeptTable, where="t") for one in tables]


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from(KINDS), min_size=3, max_size=3),
    st.integers(0, 10**6),
    st.sampled_from(["any", "only"]),
)
# Both classes promise the same: the order of classes may not decide which settings are tried.
@example([(3, 1), (1, 1), (3, 1)], 2, "any")
@example([(2, 1), (3, 1), (2, 1)], 1, "any")
def test_every_pair_of_hosts_gets_what_a_fresh_plan_of_the_pair_has(kinds, seed, rails):
    whole = cluster_with(kinds, rails)
    _, tables = planned(whole, seed)
    of_class = {(one.node_class, one.gpus): one for one in tables}
    for some in itertools.combinations(kinds, 2):
        pair = cluster_with(some, rails)
        nodes = [
            ClassRates(one, of_class[one.name, one.machine.gpu_indices]) for one in pair.classes
        ]
        by_tables = plan_over(pair, nodes, PlanRequest())
        fresh = make_cluster_plan(pair, sources_for(pair, seed), ring_counts=(1,), budget=EXACT)
        # Tables were asked more: a search that ends early may find less.
        assert by_tables.rate_gbps >= fresh.rate_gbps
        assert by_tables.choices["default"] == fresh.choices["default"]
        check_plan(by_tables, where="by tables")


def test_tables_are_read_back_from_a_plans_directory(tmp_path):
    plan, tables = planned(cluster_with([(2, 2), (3, 1)]), 1)
    write_plan(plan, tmp_path, tables=table_files(tables))
    assert load_plan(tmp_path) == plan
    names = sorted(path.name for path in (tmp_path / "tables").iterdir())
    assert names == ["box22.0-1.json", "box22.0.json", "box31.0-2.json", "box31.0.json"]
    assert [one.kept for one in read_tables(tmp_path, plan.cluster.classes)] == tables
    (first,) = {one.kept.node_class for one in read_tables(tmp_path, plan.cluster.classes[:1])}
    assert first == plan.cluster.classes[0].name
    # Another plan replaces them.
    write_plan(plan, tmp_path)
    assert not (tmp_path / "tables").exists()
    assert read_tables(tmp_path, plan.cluster.classes) == []


def test_a_table_answers_as_the_search_did_and_nothing_else(tmp_path):
    plan, tables = planned(cluster_with([(2, 2), (2, 2)]), 2)
    (own,) = (one for one in tables if one.gpus == (0, 1))
    node = ClassRates(plan.cluster.classes[0], own)
    again, found = node.choices[0]
    assert node.best_under(again, len(found.pairs)) == found
    assert [one.rate_gbps for _, one in node.choices] == sorted(
        (one.rate_gbps for _, one in node.choices), reverse=True
    )
    assert node.best_under(msgspec.structs.replace(again, channels=31), 1) is None
    best = plan_over(plan.cluster, [node], PlanRequest())
    assert (best.rate_gbps, best.paths, best.hosts) == (plan.rate_gbps, plan.paths, plan.hosts)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"format_version": 1}, "version 1"),
        ({"gpus": (0, 7)}, "does not fit"),
        ({"nics": (9,)}, "does not fit"),
        ({"hops": ()}, "does not fit"),
        ({"nics": ()}, "does not fit"),
        ({"answers": ()}, "does not fit"),
        ({"node_class": "other"}, "is of class"),
    ],
)
def test_damaged_tables_are_refused(change, word, tmp_path):
    plan, tables = planned(cluster_with([(2, 1), (2, 1)]), 3)
    files = table_files(tables)
    name = next(iter(files))
    files[name] = encode_line(msgspec.structs.replace(tables[0], **change)).decode()
    write_plan(plan, tmp_path, tables=files)
    with pytest.raises(InputError, match=word):
        read_tables(tmp_path, plan.cluster.classes)


def test_a_table_that_was_changed_or_is_gone_is_refused(tmp_path):
    plan, tables = planned(cluster_with([(2, 1), (2, 1)]), 3)
    write_plan(plan, tmp_path, tables=table_files(tables))
    path = tmp_path / "tables" / "box21.0.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(InputError, match="was changed"):
        read_tables(tmp_path, plan.cluster.classes)
    path.unlink()
    with pytest.raises(InputError, match="is missing"):
        read_tables(tmp_path, plan.cluster.classes)


@pytest.mark.parametrize("text", ["", "0", "x", "4-", "1,,2", "4-2", "99999", "0-1-2", "-1"])
def test_lists_of_gpus_per_job_that_are_refused(text):
    with pytest.raises(InputError, match="gpus_per_job"):
        job_gpus(text, range(8))


@pytest.mark.parametrize("text", ["99", "2,9", "4-9", "0+8"])
def test_gpus_per_job_that_no_host_has_are_refused(text):
    hosts = [range(4), range(8)]
    with pytest.raises(InputError, match="0-3 or 0-7"):
        job_gpus(text, *hosts)
    assert job_gpus("8,2", *hosts)[0] == [(0, 1, 2, 3), (0, 1)]


def test_gpus_that_a_host_does_not_have_are_for_other_hosts():
    assert job_gpus("16,4-7,2", range(4), range(16))[0] == [(0, 1, 2, 3), (0, 1)]


class Symmetric(MadeUp):
    """Flows that a machine's symmetry exchanges have one rate."""

    def __init__(self, seed, machine):
        super().__init__(seed)
        group = automorphisms(machine)
        points = group.points
        self._names = [
            {points[at]: points[int(image)] for at, image in enumerate(row)}
            for row in group.elements
        ]

    def rate(self, text):
        return super().rate(min(str(relabel(parse_set(text).flows[0], one)) for one in self._names))


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 10**6))
def test_gpus_that_a_symmetry_exchanges_get_the_table_that_measuring_them_gives(seed):
    machine = networked_machine(gpus=4, nics=2, numa_nodes=2)
    cluster = cluster_of([HostReport(host=f"h{n}", machine=machine) for n in range(2)])
    tables, (one,) = [], cluster.classes
    make_cluster_plan(
        cluster,
        [Symmetric(seed, machine)],
        ring_counts=(1,),
        budget=EXACT,
        tables=tables,
        gpus_per_job="0-1,2-3",
    )
    known = {kept.gpus: kept for kept in tables}
    assert image_of(known[0, 1], one, (1, 2)) is None  # on two NUMA nodes
    image = image_of(known[0, 1], one, (2, 3))
    assert image is not None
    assert "GPUs 2-3: by the rates of GPUs 0-1" in image.notices[-1]
    # Each rate is what measuring the mapped chains gives.
    source, compared = Symmetric(seed, machine), 0
    for found in image.answers:
        flows = [image.hops[n].flow for hops in found.chains for n in hops]
        (measured,) = source.measure([transfer_set(flows)])
        assert measured.rate_gbps * len(found.chains) == pytest.approx(found.rate_gbps)
        compared += 1
    assert compared
    hosts = tuple(Host(name=f"h{n}", node_class=0, slots=2) for n in range(2))
    pair = Cluster(hosts=hosts, classes=cluster.classes)
    check_plan(plan_over(pair, [ClassRates(one, image)], PlanRequest()), where="job")
    assert image.rated_default.rate_gbps == known[2, 3].rated_default.rate_gbps
    assert image_of(image, one, (0, 1)).hops == known[0, 1].hops
