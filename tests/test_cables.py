"""Rings along cables, compared with all orders of hosts."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.errors import InputError, SearchError
from tccl_py.merge.cables import MAX_DEALINGS, cabled_ring
from tccl_py.model.cluster import Cable, cabled_nics
from tccl_py.readers.cables import (
    cables_of,
    cables_of_lldp,
    cables_of_subnets,
    check_no_cables,
    doubts_of_addresses,
    subnet_prefix,
    used_functions,
)
from tccl_py.readers.switches import parse_switch_yaml
from tccl_py.readers.sysfs import HostFiles, Neighbour, neighbours
from tccl_py.simulator.descriptions import load_bundled

NAMES = "abcdefgh"


def cabling(pairs):
    """Cables whose ports are the next NICs of their hosts."""
    used, cables = Counter(), []
    for one, other in pairs:
        cables.append(Cable.between(one, [used[one]], other, [used[other]]))
        used[one] += 1
        used[other] += 1
    return cables


def equal(host, entries, exits):
    return 10.0


def ways_of(cables):
    """The functions from one host to another, in the order of cables."""
    ways = {}
    for cable in cables:
        for out, into in itertools.permutations(cable.ends):
            ways.setdefault((out.host, into.host), []).extend(zip(out.nics, into.nics, strict=True))
    return ways


def brute_force(hosts, cables, rings, rate, *, thorough=False):
    """The best rate over all orders of hosts, and of two hosts all turns of the way back.

    A `thorough` one is over all dealings of the functions of each step to the rings.
    """
    ways, best = ways_of(cables), 0.0
    for rest in itertools.permutations(hosts[1:]):
        order = (hosts[0], *rest)
        steps = list(zip(order, (*rest, order[0]), strict=True))
        if not all(step in ways for step in steps):
            continue
        dealings = [
            list(itertools.product(ways[step], repeat=rings))
            if thorough
            else [
                [ways[step][(ring + shift) % len(ways[step])] for ring in range(rings)]
                for shift in (0, len(ways[step]) // 2)[: 2 if len(hosts) == 2 else 1]
            ]
            for step in steps
        ]
        for nics in itertools.product(*dealings):
            rates = []
            for n, host in enumerate(order):
                entries = tuple(into for _, into in nics[n - 1])
                exits = tuple(out for out, _ in nics[n])
                rates.append(rate(host, entries, exits))
            best = max(best, min(rates))
    return best


@st.composite
def clusters(draw, *, most_hosts=6, most_cables=12, most_rings=4):
    hosts = NAMES[: draw(st.integers(2, most_hosts))]
    pairs = list(itertools.combinations(hosts, 2))
    cables = cabling(draw(st.lists(st.sampled_from(pairs), max_size=most_cables)))
    rates = draw(st.lists(st.sampled_from([0.0, 5.0, 7.0, 10.0]), min_size=7, max_size=7))

    def rate(host, entries, exits):
        return rates[hash((ord(host), entries, exits)) % 7]

    return hosts, cables, draw(st.integers(1, most_rings)), rate


@given(clusters())
def test_the_best_order_is_found_and_its_bound_is_reached(cluster):
    hosts, cables, rings, rate = cluster
    best = brute_force(hosts, cables, rings, rate)
    try:
        ring = cabled_ring(hosts, cables, rings, rate)
    except SearchError:
        assert brute_force(hosts, cables, rings, equal) == 0
        return
    assert best == (0 if ring is None else ring.rate_gbps)
    assert ring is None or ring.is_proven


@given(clusters(most_hosts=4, most_cables=6, most_rings=2))
def test_a_thorough_search_is_exact_over_all_dealings_of_functions(cluster):
    hosts, cables, rings, by_order = cluster

    def rate(host, entries, exits):
        return by_order(host, *zip(*sorted(zip(entries, exits, strict=True)), strict=True))

    most = brute_force(hosts, cables, rings, rate, thorough=True)
    try:
        ring = cabled_ring(hosts, cables, rings, rate, thorough=True)
    except SearchError:
        assert brute_force(hosts, cables, rings, equal) == 0
        return
    reached = 0 if ring is None else ring.rate_gbps
    few = all(len(way) ** rings <= MAX_DEALINGS for way in ways_of(cables).values())
    assert reached == most if few else reached <= most
    assert ring is None or ring.complete or not few


@given(clusters())
def test_each_step_goes_over_a_cable_function_by_function(cluster):
    hosts, cables, rings, rate = cluster
    try:
        ring = cabled_ring(hosts, cables, rings, rate)
    except SearchError:
        return
    if ring is None:
        return
    ways = ways_of(cables)
    assert sorted(ring.hosts) == sorted(hosts)
    for n, host in enumerate(ring.hosts):
        following = ring.hosts[(n + 1) % len(hosts)]
        crossing = ring.crossings[n]
        assert set(zip(crossing.exits, crossing.entries, strict=True)) <= set(ways[host, following])
        assert len(crossing.exits) == rings


@pytest.mark.parametrize("count", range(3, 17))
def test_rings_of_3_to_16_hosts_enter_by_one_port_and_leave_by_the_other(count):
    hosts = [f"h{n}" for n in range(count)]
    cables = [
        Cable.between(a, (0, 2), b, (1, 3))
        for a, b in zip(hosts, hosts[1:] + hosts[:1], strict=True)
    ]
    ring = cabled_ring(hosts, cables, 4, equal)
    assert ring.hosts == tuple(hosts)
    assert {(c.exits, c.entries) for c in ring.crossings} == {((0, 2, 0, 2), (1, 3, 1, 3))}


def test_meshes_and_a_torus_of_two_by_four_have_rings():
    mesh = cabled_ring("abcd", cabling(itertools.combinations("abcd", 2)), 1, equal)
    assert mesh.hosts == tuple("abcd")
    torus = [*zip("abcd", "bcda", strict=True), *zip("efgh", "fghe", strict=True)]
    torus += zip("abcd", "efgh", strict=True)
    ring = cabled_ring(NAMES, cabling(torus), 1, equal)
    assert sorted(ring.hosts) == sorted(NAMES)


@pytest.mark.parametrize("seed", range(3))
def test_rings_of_64_hosts_with_chords_are_found_whatever_their_order(seed):
    chosen = random.Random(seed)
    hosts = [f"h{number}" for number in range(64)]
    order, chords = (chosen.sample(hosts, len(hosts)) for _ in range(2))
    pairs = [
        *zip(order, order[1:] + order[:1], strict=True),
        *zip(*[iter(chords)] * 2, strict=True),
    ]
    ring = cabled_ring(hosts, cabling(pairs), 1, equal)
    assert sorted(ring.hosts) == sorted(hosts)


def test_a_search_that_ends_without_a_ring_does_not_say_that_there_is_none(monkeypatch):
    monkeypatch.setattr("tccl_py.merge.cables.MAX_STEPS", 3)
    with pytest.raises(SearchError, match="steps of the search; list hosts in an order"):
        cabled_ring("acbd", cabling(["ab", "bc", "cd", "da"]), 1, equal)


def test_the_given_order_stays_where_no_other_is_faster():
    cables = cabling(itertools.combinations("abcd", 2))
    assert cabled_ring("acbd", cables, 1, equal).hosts == tuple("acbd")
    assert cabled_ring("dbca", cables, 1, equal, keep_order=True).hosts == tuple("dbca")


def test_a_doubled_cable_of_two_hosts_carries_both_ways():
    def apart(host, entries, exits):
        return 5.0 if entries == exits else 10.0

    ring = cabled_ring("ab", cabling(["ab", "ab"]), 1, apart)
    assert ring.rate_gbps == 10.0
    assert ring.crossings[0].exits != ring.crossings[1].entries


@pytest.mark.parametrize(
    ("hosts", "pairs", "sentence"),
    [
        ("abc", ["ab", "bc"], r"no two lead to a, c$"),
        ("ab", [], r"no cables lead from a to b$"),
        ("abcdef", ["ab", "bc", "ca", "de", "ef", "fd"], r"no cables lead from a to d$"),
        ("abcde", ["ab", "bc", "ca", "cd", "de", "ec"], r"would pass c twice"),
    ],
)
def test_cables_without_a_ring_are_named_by_the_hosts_that_lack_them(hosts, pairs, sentence):
    with pytest.raises(SearchError, match=sentence):
        cabled_ring(hosts, cabling(pairs), 1, equal)


def test_a_given_order_without_cables_is_refused_by_its_steps():
    with pytest.raises(SearchError, match="no cable leads from a to c, b to d"):
        cabled_ring("acbd", cabling(["ab", "bc", "cd", "da"]), 1, equal, keep_order=True)


def test_a_search_that_is_cut_off_calls_nothing_proven(monkeypatch):
    cables = cabling(itertools.combinations("abcd", 2))

    def rate(host, entries, exits):
        return 10.0 if (entries, exits) == ((0,), (1,)) else 5.0

    for steps, proven in ((4, False), (12, False), (13, True)):
        monkeypatch.setattr("tccl_py.merge.cables.MAX_STEPS", steps)
        ring = cabled_ring("abcd", cables, 1, rate)
        assert (ring.rate_gbps, ring.is_proven) == (5.0, proven)
        assert ring.bound_gbps == (5.0 if proven else 10.0)


# Cables of a file


FILE = """
ports:
  p0: [rocep1s0f0, roceP2p1s0f0]
  p1: [rocep1s0f1, roceP2p1s0f1]
cables:
  - [a:p0, b:p1]
  - [b:p0, outside:p1]
"""


def read(text, hosts="ab"):
    machines = dict.fromkeys(hosts, load_bundled("gb10-2port").machine)
    return cables_of(parse_switch_yaml(text, where="net.yaml", hosts=hosts).ports, machines)


def test_functions_of_a_port_are_joined_in_order_and_hosts_outside_the_job_left_out():
    assert read(FILE) == (Cable.between("a", (0, 2), "b", (1, 3)),)
    assert read("cables: [[a:rocep1s0f1, b:roceP2p1s0f1]]") == (Cable.between("a", [1], "b", [3]),)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("[b:p0, outside:p1]", "[b:p1, outside:p1]", "port b:p1 has the cable of cables[0]"),
        ("[b:p0, outside:p1]", "[b:p0, b:p1]", "leads from a host to itself"),
        ("a:p0", "a:p7", "has no port or NIC 'p7'"),
        ("a:p0", "a", "is no end of a cable"),
        ("a:p0", "a:rocep1s0f0", "names one function of a port"),
        ("[rocep1s0f1, roceP2p1s0f1]", "[rocep1s0f1]", "ports of 2 and 1 functions"),
        ("[rocep1s0f1, roceP2p1s0f1]", "[rocep1s0f0]", "is a function of p0 too"),
        ("[rocep1s0f1, roceP2p1s0f1]", "[]", "has no NIC"),
        ("b:p1", "c:p1", "no cable leads from another host of the job to a, b"),
        ("ports:", "switches: [{name: s, hosts: a}]\nports:", "has switches and cables"),
        ("ports:", "rails: only\nports:", "has cables and rails: only"),
        ("[rocep1s0f1, roceP2p1s0f1]", "[N1, rocep1s0f1]", "names a NIC of b twice in port p1"),
        ("a:p0", "A:p0", "to a, b; the file has A, outside besides"),
        ("a:p0", "'a b:p0'", "'a b' cannot be a name here"),
        ("[a:p0, b:p1]", "a:p0 b:p1", "write cables: [[HOST:PORT, HOST:PORT], ...]"),
        (FILE[FILE.index("cables:") :], "", "has ports and no cable"),
    ],
)
def test_cables_that_do_not_fit_are_refused_by_name(old, new, part):
    assert old in FILE
    with pytest.raises(InputError) as refused:
        read(FILE.replace(old, new, 1))
    assert part in str(refused.value)
    assert "net.yaml" in str(refused.value)


def test_hosts_without_two_ways_and_nics_with_two_cables_are_named_before_planning():
    with pytest.raises(InputError, match=r"no two cables lead from other hosts .* to a, c; the f"):
        read(FILE.replace("outside", "c") + "  - [a:p1, C:p0]", "abc")
    with pytest.raises(InputError, match=r"cables\[1\]: N1 of b has the cable of cables\[0\]"):
        read("cables: [[a:N0, b:N1], [a:N1, b:rocep1s0f1]]")


# Cables that addresses tell


def addresses(**hosts):
    """NICs by host; an address without a mask has 24 bits."""
    return {
        host: {nic: one if "/" in one else f"{one}/24" for nic, one in enumerate(each) if one}
        for host, each in hosts.items()
    }


def test_rails_of_a_switch_are_no_cables():
    rails = {host: [f"10.0.{rail}.{n}" for rail in (0, 1)] for n, host in enumerate("abc")}
    assert cables_of_subnets(addresses(**rails)) == ()


@pytest.mark.parametrize(
    "hosts",
    [
        {"a": ["10.0.0.1"], "b": ["10.0.0.2"]},  # two hosts: as well a switch
        {"a": ["10.0.0.1", "10.0.0.2"], "b": ["10.0.1.1"], "c": ["10.0.1.2"]},  # a host's own
        {"a": ["10.0.0.1"], "b": ["10.0.0.2"], "c": ["10.0.1.1"]},  # one is alone
        {"a": ["fe80::1/0"], "b": ["fe80::2/0"], "c": ["fe80::3/0"]},
        # A ring of cables, and a switch besides.
        {
            "a": ["10.0.1.1", "10.0.3.1", "10.9.0.1"],
            "b": ["10.0.1.2", "10.0.2.1", "10.9.0.2"],
            "c": ["10.0.2.2", "10.0.3.2", "10.9.0.3"],
        },
    ],
)
def test_addresses_that_leave_doubt_tell_no_cables(hosts):
    assert cables_of_subnets(addresses(**hosts)) == ()


def ring_of_three(address):
    """Three hosts in a ring, each by functions 0, 2 to functions 1, 3 of the next.

    `address(cable, function, end)` is that of an end: a cable's function is 0 or 1, its end 0 or 1.
    """
    hosts: dict[str, dict[int, str]] = {host: {} for host in "abc"}
    for cable, function in itertools.product(range(3), range(2)):
        for end, host in enumerate("abc"[cable] + "abc"[(cable + 1) % 3]):
            hosts[host][2 * function + end] = address(cable, function, end)
    return hosts


def test_functions_of_a_port_may_share_the_subnet_of_their_cable_and_the_first_carries_all():
    # As NVIDIA addresses them.
    hosts = ring_of_three(lambda cable, function, end: f"10.0.{cable}.{2 * function + end + 1}/24")
    cables = cables_of_subnets(hosts)
    assert {(end.host, end.nics) for cable in cables for end in cable.ends} == {
        (host, nics) for host in "abc" for nics in ((0, 2), (1, 3))
    }
    used = used_functions(cables, hosts)
    assert {(end.host, end.nics) for cable in used for end in cable.ends} == {
        (host, nics) for host in "abc" for nics in ((0,), (1,))
    }
    (doubt,) = doubts_of_addresses(hosts)
    assert all(part in doubt for part in ("a and b", "/24 each", "/25 each"))
    assert subnet_prefix(used, hosts, where="x") is None


@pytest.mark.parametrize("bits", [24, 25])
def test_functions_with_a_subnet_each_are_all_used(bits):
    """A /24 for each pair of functions, or a /25 each of the cable's /24."""

    def address(cable, function, end):
        wide = f"10.{cable}.{function}.{end + 1}/24"
        return wide if bits == 24 else f"10.0.{cable}.{128 * function + end + 1}/25"

    hosts = ring_of_three(address)
    cables = cables_of_subnets(hosts)
    assert len(cables) == 6
    assert used_functions(cables, hosts) == cables
    assert not list(doubts_of_addresses(hosts))
    assert subnet_prefix(cables, hosts, where="x") == (None if bits == 24 else 25)


def test_link_local_addresses_tell_no_cables_and_are_doubted():
    hosts = addresses(
        **{host: [f"169.254.0.{n}/16", f"169.254.1.{n}/16"] for n, host in enumerate("abc")}
    )
    assert cables_of_subnets(hosts) == ()
    (doubt,) = doubts_of_addresses(hosts)
    assert "169.254.0.0/16" in doubt


@pytest.mark.parametrize(
    ("hosts", "alone"),
    [
        ({"a": ["10.0.0.1"], "b": ["10.0.0.2"], "c": ["10.0.1.1"]}, "c share no subnet"),
        ({"a": ["10.0.0.1", "10.0.0.2"], "b": ["10.0.0.3"], "c": ["10.0.1.1"]}, "a and b"),
    ],
)
def test_hosts_whose_subnets_join_two_each_are_not_planned_as_at_a_switch(hosts, alone):
    with pytest.raises(InputError, match=r"10\.0\.0\.0/24.*") as refused:
        check_no_cables(addresses(**hosts), where="this MPI job")
    assert alone in str(refused.value)


@pytest.mark.parametrize(
    "hosts",
    [
        {host: ["10.0.0.{n}", "10.0.1.{n}"] for host in "abc"},
        {"a": ["10.0.0.1"], "b": ["10.0.0.2"]},
        {"a": ["10.0.0.1"], "b": ["10.0.1.1"], "c": ["10.0.2.1"]},
        {"a": [], "b": [], "c": []},
    ],
)
def test_hosts_of_a_switch_and_hosts_without_addresses_may_be_planned_so(hosts):
    filled = {h: [one.format(n=n) for one in each] for n, (h, each) in enumerate(hosts.items())}
    check_no_cables(addresses(**filled), where="x")


# Cables that LLDP tells


RECORDED = json.loads((Path(__file__).parent / "cases/lldp.json").read_text())
FUNCTIONS = ("rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1")


def recorded(root, host):
    """What a host's NICs hear, from the files that systemd-networkd wrote."""
    for number, (interface, frame) in enumerate(RECORDED[host].items(), start=3):
        for place, data in (
            (f"sys/class/net/{interface}/ifindex", str(number).encode()),
            (f"run/systemd/netif/lldp/{number}", bytes.fromhex(frame)),
        ):
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).write_bytes(data)
    files = HostFiles(root=root)
    return {nic: (name, neighbours(files, name)) for nic, name in enumerate(FUNCTIONS)}


def hears(*ends):
    """What hosts' NICs hear: pairs (host, nic), of interfaces that are named by their number."""
    heard: dict = {}
    for (host, nic), *far in ends:
        ports = tuple(Neighbour(system, str(port)) for system, port in far)
        heard.setdefault(host, {})[nic] = (str(nic), ports)
    return heard


def test_recorded_lldp_tells_the_cables_of_three_hosts(tmp_path):
    heard = {host: recorded(tmp_path / host, host) for host in ("spark1", "spark2", "spark3")}
    assert {end for cable in cables_of_lldp(heard) for end in cabled_nics([cable])} == {
        end
        for n in range(3)
        for function in (0, 2)
        for end in cabled_nics(
            [Cable.between(f"spark{n + 1}", [function], f"spark{(n + 1) % 3 + 1}", [function + 1])]
        )
    }


def test_functions_that_hear_all_of_the_far_port_share_a_cable():
    near, far = [("a", 0), ("a", 2)], [("b.local", 1), ("b.local", 3)]
    heard = hears(*((end, *far) for end in near), *((end, *near) for end in far))
    assert cables_of_lldp(heard) == (Cable.between("a", [0, 2], "b.local", [1, 3]),)


@pytest.mark.parametrize(
    "ends",
    [
        [(("a", 0), ("switch", 7)), (("b", 0), ("switch", 8))],
        [(("a", 0), ("b", 0), ("switch", 7)), (("b", 0), ("a", 0), ("switch", 7))],
        [(("a", 0), ("b", 0), ("c", 0)), (("b", 0), ("a", 0), ("c", 0)), (("c", 0), ("a", 0))],
        [(("a", 0), ("b", 0)), (("b", 0),)],
        [(("a", 0), ("a", 1)), (("a", 1), ("a", 0))],
        [(("a", 0), ("b", 0)), (("b", 0), ("a", 0)), (("c", 0),)],
        [(("a", 0), ("a", 2), ("a", 3)), (("b", 1), ("a", 2), ("a", 3))]
        + [(("a", nic), ("a", 0), ("b", 1)) for nic in (2, 3)],
        [(("a", 0),), (("b", 0),)],
        [(("a", 0), ("b", 0)), (("b", 0), ("a", 0)), (("a", 1), ("switch", 7))],
    ],
)
def test_lldp_that_leaves_doubt_tells_no_cables(ends):
    assert cables_of_lldp(hears(*ends)) == ()


CABLE = [Cable.between("a", [0], "b", [1])]


def test_addresses_that_contradict_a_cable_of_a_file_are_named():
    subnet_prefix(CABLE, addresses(a=["10.0.0.1"], b=["10.0.3.3", "10.0.0.2"]), where="net.yaml")
    subnet_prefix(CABLE, addresses(a=[""], b=["10.0.3.3", "10.0.0.2"]), where="net.yaml")
    with pytest.raises(InputError, match=r"N0 of a, which is 10\.0\.0\.1/24, and N1 of b"):
        subnet_prefix(CABLE, addresses(a=["10.0.0.1"], b=["10.0.0.2", "10.0.1.2"]), where="x")


def test_a_subnet_of_several_cables_is_named_since_nccl_tells_cables_by_subnets():
    hosts = addresses(a=["10.0.0.1", "10.0.0.2"], b=["10.0.0.3", "10.0.0.4"], c=["10.0.0.5"])
    cables = [Cable.between("a", [0], "b", [0]), Cable.between("b", [1], "c", [0])]
    with pytest.raises(InputError, match=r"10\.0\.0\.0/24 is on cables of a, b, c"):
        subnet_prefix(cables, hosts, where="x")
    subnet_prefix([Cable.between("a", [0, 1], "b", [0, 1])], hosts, where="x")


@pytest.mark.parametrize(
    ("masks", "bits"),
    [
        (["10.0.0.{}/24", "10.0.1.{}/24", "10.0.2.{}/24"], None),
        (["10.0.0.{}/30", "10.0.1.{}/30", "10.0.2.{}/30"], None),
        (["10.0.0.{}/30", "10.0.0.4{}/30", "10.0.0.8{}/30"], 30),
        (["10.0.{}.1/16", "10.1.{}.1/16", "10.2.{}.1/16"], 16),
    ],
)
def test_nccl_compares_other_bits_where_24_do_not_tell_cables_apart(masks, bits):
    first, second, third = ([mask.format(end) for end in (1, 2)] for mask in masks)
    hosts = addresses(a=[first[0], third[1]], b=[second[0], first[1]], c=[third[0], second[1]])
    cables = cables_of_subnets(hosts)
    assert len(cables) == 3
    assert subnet_prefix(cables, hosts, where="x") == bits
