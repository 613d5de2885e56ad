"""Merging chains of nodes to rings: the best ring for every order, and true bounds."""

import contextlib
import functools
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import SearchError
from tccl_py.merge import rings, walks
from tccl_py.merge.rings import ChainTable, merge_in_order, merge_with_switches
from tccl_py.merge.walks import Joiner, Orders, host_piece, is_ruled_out
from tccl_py.model.cluster import SwitchTree

SPARSE = (0, 0, 0, 0, 1, 2, 3)
DENSE = (0, 1, 2, 3, 4, 5)


def random_tables(seed, *, classes, crossings, values=None):
    rng = np.random.default_rng(seed)
    values = values or (SPARSE if rng.uniform() < 0.6 else DENSE)
    rates = rng.choice(values, size=(classes, crossings, crossings)).astype(float)
    return [ChainTable(name=f"class{c}", rates=rates[c]) for c in range(classes)]


def table(rows, name="a"):
    return ChainTable(name=name, rates=np.array(rows, dtype=float))


def rate_of(tables, order, crossings):
    """The rate by definition: node n is entered by crossing n - 1."""
    steps = range(len(order))
    return min(tables[order[n]].rates[crossings[n - 1], crossings[n]] for n in steps)


def merge_any_order(tables, counts):
    """The best ring through so many nodes of each class, without switches."""
    classes = {f"{c}.{i}": c for c, count in enumerate(counts) for i in range(count)}
    return merge_with_switches(tables, classes, SwitchTree(name="", hosts=tuple(classes)))


def brute_force(tables, order):
    """The best rate in this order, over all crossings."""
    crossings = range(len(tables[0].rates))
    return max(
        rate_of(tables, order, choice) for choice in itertools.product(crossings, repeat=len(order))
    )


def rate_or_none(merge, *given, **more):
    """The ring's rate, once the ring is seen to be one; 0 without a ring."""
    try:
        ring = merge(*given, **more)
    except SearchError:
        return 0.0
    assert ring.rate_gbps == rate_of(given[0], ring.order, ring.crossings)
    assert ring.is_proven
    assert ring.bound_gbps == ring.rate_gbps
    return ring.rate_gbps


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 4), st.integers(1, 3))
def test_merging_in_order_equals_brute_force(seed, nodes, crossings, classes):
    tables = random_tables(seed, classes=classes, crossings=crossings)
    order = np.random.default_rng(seed).integers(0, classes, nodes).tolist()
    assert rate_or_none(merge_in_order, tables, order) == brute_force(tables, order)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.lists(st.integers(0, 4), min_size=2, max_size=5)
)
def test_merging_in_any_order_equals_brute_force(seed, crossings, nodes):
    tables = random_tables(seed, classes=max(nodes) + 1, crossings=crossings)
    counts = np.bincount(nodes).tolist()
    orders = {(nodes[0], *rest) for rest in itertools.permutations(nodes[1:])}
    best = max(brute_force(tables, order) for order in orders)
    assert rate_or_none(merge_any_order, tables, counts) == best


def stays_together(tree, order):
    """Whether each switch is left once at most, going round."""
    return all(
        sum(order[n - 1] in inside and order[n] not in inside for n in range(len(order))) <= 1
        for inside in (set(switch.all_hosts) for switch in tree.all_switches)
    )


TREES = [
    SwitchTree(name="r", hosts=("a", "b", "c", "d")),
    SwitchTree(
        name="r",
        switches=(
            SwitchTree(name="s", hosts=("a", "b")),
            SwitchTree(name="t", hosts=("c", "d", "e")),
        ),
    ),
    SwitchTree(
        name="r",
        hosts=("a",),
        switches=(
            SwitchTree(name="s", hosts=("b",), switches=(SwitchTree(name="u", hosts=("c", "d")),)),
            SwitchTree(name="t", hosts=("e",)),
            SwitchTree(name="empty"),
        ),
    ),
    SwitchTree(name="r", switches=(SwitchTree(name="s", hosts=("a", "b", "c", "d", "e")),)),
]


def with_uplinks(tree, rates):
    """The tree with a rate, or none, for each uplink in turn."""
    below = tuple(with_uplinks(switch, rates) for switch in tree.switches)
    return msgspec.structs.replace(tree, switches=below, uplink_gbps=next(rates))


def carried(tree, order):
    """What uplinks leave of a ring: each is shared by the steps that leave its switch."""
    shares = [np.inf]
    for switch in tree.all_switches:
        below = set(switch.all_hosts)
        times = sum(order[n - 1] in below and order[n] not in below for n in range(len(order)))
        if switch.uplink_gbps is not None and times:
            shares.append(switch.uplink_gbps / times)
    return min(shares)


@contextlib.contextmanager
def few_products():
    """Merge as where hosts have too many kinds for all orders."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (walks, rings):
            patch.setattr(module, "MAX_PRODUCTS", 5)
        patch.setattr(walks, "PART_PRODUCTS", 2)
        patch.setattr(walks, "PART", 2)
        yield


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(TREES),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.sampled_from((None, 1.0, 2.0, 3.0, 4.5, 7.0)), min_size=6, max_size=6),
    st.booleans(),
)
def test_merging_under_switches_is_between_nothing_and_brute_force_over_all_orders(
    seed, tree, crossings, classes, uplinks, rough
):
    tree = with_uplinks(tree, iter(uplinks))
    tables = random_tables(seed, classes=classes, crossings=crossings)
    first, *rest = tree.all_hosts
    chosen = np.random.default_rng(seed).integers(0, classes, len(rest) + 1).tolist()
    of = dict(zip((first, *rest), chosen, strict=True))
    chains = functools.cache(lambda order: brute_force(tables, order))
    best = together = 0.0
    for others in itertools.permutations(rest):
        order = (first, *others)
        rate = min(chains(tuple(of[host] for host in order)), carried(tree, order))
        best, together = max(best, rate), max(together, rate * stays_together(tree, order))
    try:
        with few_products() if rough else contextlib.nullcontext():
            ring = merge_with_switches(tables, of, tree)
    except SearchError:
        assert rough or best == 0
        return
    assert sorted(ring.hosts) == sorted(of)
    assert tuple(of[host] for host in ring.hosts) == ring.order
    chains_rate = rate_of(tables, ring.order, ring.crossings)
    assert ring.rate_gbps == min(chains_rate, carried(tree, ring.hosts))
    assert 0 < ring.rate_gbps <= best <= ring.bound_gbps
    assert ring.is_proven == (ring.rate_gbps == ring.bound_gbps)
    if rough:
        return
    # Hosts of a switch come apart only where that is faster.
    assert ring.rate_gbps >= together
    limits = {switch.uplink_gbps for switch in tree.all_switches} - {None}
    if not limits or max(limits) < 2 * best:
        assert ring.is_proven


def test_hosts_of_a_switch_are_apart_where_chains_ask_for_it_and_uplinks_bear_it():
    there, back = table([[0, 10], [1, 0]], "there"), table([[0, 1], [10, 0]], "back")
    classes = {"aa": 0, "aaa": 0, "bb": 1, "bbb": 1}
    for uplink, rate in ((None, 10), (40.0, 10), (8.0, 4), (1.5, 1)):
        tree = with_uplinks(uplinked(a=0, b=0), iter((uplink, uplink, None)))
        ring = merge_with_switches([there, back], classes, tree)
        assert (ring.rate_gbps, ring.bound_gbps) == (rate, rate)
        assert (ring.order in ((0, 1, 0, 1), (1, 0, 1, 0))) == (rate > 1)


@pytest.mark.parametrize("seed", range(60))
def test_where_a_switch_has_too_many_kinds_the_bound_is_still_true(seed):
    exact = _large_switch(seed)
    with few_products():
        rough = _large_switch(seed)
    assert (exact is None) or exact.is_proven
    if rough is not None:
        assert rough.rate_gbps <= exact.rate_gbps <= rough.bound_gbps
        assert stays_together(WIDE, rough.hosts)


WIDE = SwitchTree(
    name="r",
    hosts=("x", "y"),
    switches=(
        SwitchTree(name="s", hosts=tuple("abcde")),
        SwitchTree(name="t", switches=(SwitchTree(name="u", hosts=tuple("fghij")),)),
    ),
)


def _large_switch(seed):
    hosts = list(WIDE.all_hosts)
    tables = random_tables(seed, classes=len(hosts), crossings=4, values=(0, 0, 0, 0, 3, 4, 5))
    # Uplinks that carry any ring once, and none twice.
    tight = with_uplinks(WIDE, itertools.repeat(5.0))
    try:
        ring = merge_with_switches(tables, {h: c for c, h in enumerate(hosts)}, tight)
    except SearchError:
        return None
    assert ring.rate_gbps == rate_of(tables, ring.order, ring.crossings)
    return ring


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 6))
def test_rates_follow_what_is_turned_scaled_renamed_or_added(seed, nodes, crossings):
    rng = np.random.default_rng(seed)
    tables = random_tables(seed, classes=3, crossings=crossings)
    order = rng.integers(0, 3, nodes).tolist()
    counts = np.bincount(order, minlength=3).tolist()
    whole = np.stack([t.rates for t in tables])
    shuffled = rng.permutation(crossings)
    wider = np.pad(whole, ((0, 0), (0, 1), (0, 1)))
    wider[:, -1, :] = rng.integers(0, 4, wider[:, -1, :].shape)
    for merge, wanted in ((merge_in_order, order), (merge_any_order, counts)):
        rate = rate_or_none(merge, tables, wanted)
        assert rate_or_none(merge, named(whole * 4), wanted) == rate * 4
        assert rate_or_none(merge, named(whole[:, shuffled][:, :, shuffled]), wanted) == rate
        assert rate_or_none(merge, named(wider), wanted) >= rate
    rate = rate_or_none(merge_in_order, tables, order)
    assert rate_or_none(merge_in_order, tables, order[1:] + order[:1]) == rate
    assert rate_or_none(merge_in_order, named(whole.transpose(0, 2, 1)), order[::-1]) == rate


def named(rates):
    return [ChainTable(name=f"class{c}", rates=some) for c, some in enumerate(rates)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_no_order_is_above_a_free_one_and_no_free_one_above_the_bound(seed, nodes):
    tables = random_tables(seed, classes=4, crossings=5)
    order = np.random.default_rng(seed).integers(0, 4, nodes).tolist()
    counts = np.bincount(order, minlength=4).tolist()
    fixed = rate_or_none(merge_in_order, tables, order)
    assert fixed <= rate_or_none(merge_any_order, tables, counts)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 7), st.integers(2, 5), st.floats(0.05, 0.3))
def test_parts_find_only_what_all_orders_have(seed, crossings, kinds, density):
    rng = np.random.default_rng(seed)
    relations = rng.uniform(size=(kinds, crossings, crossings)) < density
    counts = rng.integers(1, 4, kinds).tolist()
    every = Orders(list(relations)).relation(tuple(counts))
    kind_of = np.repeat(np.arange(kinds), counts).tolist()
    pieces = [host_piece(host, relations[kind]) for host, kind in enumerate(kind_of)]
    with few_products():
        whole = Joiner().join(pieces)
    assert not (is_ruled_out(list(relations), counts) and np.diagonal(every).any())
    assert not (whole.relation & ~every).any()
    assert not whole.exact or (whole.relation == every).all()
    for entry, leave in np.argwhere(whole.relation).tolist():
        before = entry
        steps = list(whole.steps(entry, leave))
        for host, after in steps:
            assert relations[kind_of[host]][before, after]
            before = after
        assert before == leave
        assert sorted(host for host, _ in steps) == list(range(len(pieces)))


@pytest.mark.parametrize("seed", range(12))
def test_rings_over_thousands_of_hosts_of_a_few_classes_are_proven(seed):
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(2, 5))
    tables = random_tables(seed, classes=classes, crossings=8, values=SPARSE)
    ring = merge_any_order(tables, rng.integers(200, 2_000, classes).tolist())
    assert ring.is_proven
    assert ring.rate_gbps == rate_of(tables, ring.order, ring.crossings)


@pytest.mark.parametrize(("uplink", "share"), [(None, 1.0), (50.0, 1.0), (100.0, 0.999)])
def test_a_thousand_hosts_of_three_classes_reach_the_bound_or_nearly(uplink, share):
    rng = np.random.default_rng(0)
    tables = named(rng.uniform(0, 50, (3, 24, 24)))
    names = [f"h{host}" for host in range(1_024)]
    spans = [tuple(names[start : start + 32]) for start in range(0, 1_024, 32)]
    leaves = (SwitchTree(name=span[0], hosts=span, uplink_gbps=uplink) for span in spans)
    tree = SwitchTree(name="root", switches=tuple(leaves))
    classes = dict(zip(names, rng.integers(0, 3, 1_024).tolist(), strict=True))
    ring = merge_with_switches(tables, classes, tree)
    chains = rate_of(tables, ring.order, ring.crossings)
    assert ring.rate_gbps == min(chains, carried(tree, ring.hosts))
    assert share * ring.bound_gbps <= ring.rate_gbps <= ring.bound_gbps


@pytest.mark.parametrize(("counts", "closes"), [((1, 1), True), ((2, 1), False), ((3, 3), True)])
def test_potentials_rule_out_what_climbs_at_each_step(counts, closes):
    there = np.eye(2, k=1, dtype=bool)
    assert is_ruled_out([there, there.T], counts) != closes
    # Each step goes on by one of three crossings: potentials cannot tell thirds of a round.
    onward = np.roll(np.eye(3, dtype=bool), 1, axis=1)
    assert not is_ruled_out([onward], [1])


def test_many_classes_have_a_ring_near_the_bound():
    rng = np.random.default_rng(0)
    tables = named(rng.uniform(0, 50, (40, 16, 16)))
    ring = merge_any_order(tables, [25] * 40)
    assert ring.bound_gbps * 0.9 <= ring.rate_gbps <= ring.bound_gbps
    assert ring.rate_gbps == rate_of(tables, ring.order, ring.crossings)


def test_a_ring_in_two_pieces_is_none():
    apart = table([[5, 0], [0, 0]], "left"), table([[0, 0], [0, 5]], "right")
    with pytest.raises(SearchError, match="no ring: no order was found"):
        merge_any_order(apart, [3, 3])
    with pytest.raises(SearchError, match="no ring: chains of nodes in this order meet in no"):
        merge_in_order(apart, [0, 1])


def test_nodes_alternate_where_crossings_force_them_to():
    there, back = table([[0, 5], [1, 0]], "there"), table([[0, 1], [5, 0]], "back")
    ring = merge_any_order([there, back], [500, 500])
    assert ring.rate_gbps == 5
    assert ring.order[::2] in ((0,) * 500, (1,) * 500)
    assert merge_in_order([there, back], [0] * 500 + [1] * 500).rate_gbps == 1


def test_ten_thousand_equal_nodes_take_powers():
    ring = merge_in_order(random_tables(1, classes=1, crossings=16, values=DENSE), [0] * 10_000)
    assert ring.rate_gbps == 5
    assert len(ring.crossings) == 10_000


def test_many_equal_hosts_under_switches_are_exact():
    tables = random_tables(3, classes=2, crossings=8, values=SPARSE)
    switches = [
        SwitchTree(name=f"s{s}", hosts=tuple(f"h{s}.{i}" for i in range(16))) for s in range(16)
    ]
    tree = SwitchTree(name="root", switches=tuple(switches))
    classes = {host: i % 5 == 0 for i, host in enumerate(tree.all_hosts)}
    ring = merge_with_switches(tables, {h: int(c) for h, c in classes.items()}, tree)
    assert ring.is_proven
    assert stays_together(tree, ring.hosts)
    assert ring.rate_gbps == rate_of(tables, ring.order, ring.crossings)


def uplinked(**rates):
    below = [SwitchTree(name=n, hosts=(n * 2, n * 3), uplink_gbps=r) for n, r in rates.items()]
    return SwitchTree(name="root", switches=tuple(below), uplink_gbps=1.0)


def test_an_uplink_caps_the_ring_and_is_shared_by_the_passes_of_a_given_order():
    fast = [table([[40]])]
    tree = uplinked(a=30.0, b=20.0)
    classes = dict.fromkeys(("aa", "aaa", "bb", "bbb"), 0)
    ring = merge_with_switches(fast, classes, tree)
    assert (ring.rate_gbps, ring.bound_gbps, ring.is_proven) == (20, 20, True)
    given = merge_with_switches(fast, classes, tree, given_order=["aa", "bb", "aaa", "bbb"])
    assert given.rate_gbps == 10
    assert given.hosts == ("aa", "bb", "aaa", "bbb")
    together = merge_with_switches(fast, classes, tree, given_order=["aaa", "aa", "bb", "bbb"])
    assert together.rate_gbps == 20


def test_a_class_without_any_chain_is_named():
    nothing = table([[0, 0], [0, 0]], "idle")
    for merge, nodes in ((merge_in_order, [0, 1]), (merge_any_order, [1, 1])):
        with pytest.raises(SearchError, match="no ring: node class idle has no chain at all"):
            merge([table([[1, 1], [1, 1]]), nothing], nodes)
