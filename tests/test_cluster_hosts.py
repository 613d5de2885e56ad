"""Clusters: which machines are one class, and parts of a cluster that do not fit together."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json
from tccl_py.model.cluster import (
    Cluster,
    Host,
    NodeClass,
    SwitchTree,
    check_cluster,
    doubtful_uplinks,
)
from tccl_py.model.machine import (
    HiddenLink,
    Knowledge,
    Machine,
    Nic,
    NvLink,
    PciBridge,
    PciLink,
    PeerAccess,
    check,
)
from tccl_py.model.reports import HostReport, canonical, cluster_of
from tccl_py.simulator.descriptions import bundled_names, load_bundled
from tests.effort import calls_at_most
from tests.toy import toy_machine

replace = msgspec.structs.replace


def refused(call, *parts: str) -> None:
    """`call` is refused by a sentence that has the parts."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert text.isprintable() and len(text) < 400, text
    for part in parts:
        assert part in text, text


def with_nics(machine: Machine, *, count: int = 2, names: str = "mlx5_{}") -> Machine:
    """The machine with NICs below the parents of its GPUs."""
    parents = [gpu.parent for gpu in machine.gpus]
    nics = tuple(
        Nic(
            index=i,
            name=names.format(i),
            parent=parents[i % len(parents)],
            bus_id=f"0000:c{i}:00.0",
            guid=f"0x{i:016x}",
            speed_mbps=200_000,
        )
        for i in range(count)
    )
    return check(replace(machine, nics=nics), where="test")


def renamed(machine: Machine, knowledge: Knowledge, seed: int) -> tuple[Machine, Knowledge]:
    """The same machine as another host would have it: other bus ids, other orders of parts."""
    chance = random.Random(seed)
    buses = {b.bus_id: f"{chance.randrange(1 << 16):04x}:{i:02x}:00.{chance.randrange(8)}"
             for i, b in enumerate(machine.bridges)}  # fmt: skip

    def end(name: str) -> str:
        return buses.get(name, name)

    def mixed(parts):
        return tuple(chance.sample(parts, len(parts)))

    other = replace(
        machine,
        name=f"host{seed}",
        numa_nodes=tuple(replace(n, affinity=f"{seed:x}") for n in machine.numa_nodes),
        bridges=mixed(
            [replace(b, bus_id=end(b.bus_id), parent=end(b.parent)) for b in machine.bridges]
        ),
        gpus=tuple(
            replace(g, bus_id=f"ffff:{g.index:02x}:00.0", parent=end(g.parent))
            for g in machine.gpus
        ),
        nics=mixed(
            [replace(n, bus_id="", guid=f"g{seed}", parent=end(n.parent)) for n in machine.nics]
        ),
        nvswitches=tuple(replace(s, bus_id="") for s in machine.nvswitches),
        nvlinks=mixed(machine.nvlinks),
    )
    links = mixed(
        [replace(h, one=end(h.other), other=end(h.one), note="x") for h in knowledge.hidden_links]
    )
    facts = mixed(knowledge.peer_access)
    return check(other, where="test"), replace(knowledge, hidden_links=links, peer_access=facts)


def reports(*machines: tuple[Machine, Knowledge] | Machine) -> list[HostReport]:
    pairs = [one if isinstance(one, tuple) else (one, Knowledge()) for one in machines]
    return [HostReport(host=f"n{i}", machine=m, knowledge=k) for i, (m, k) in enumerate(pairs)]


def numbers(*machines: tuple[Machine, Knowledge] | Machine) -> tuple[int, ...]:
    return tuple(cluster_of(reports(*machines)).host_classes.values())


# Classes

SWITCHED = with_nics(toy_machine(gpus=4, numa_nodes=2, per_switch=2))


@pytest.mark.parametrize("name", bundled_names())
def test_what_names_one_host_splits_no_class(name):
    model = load_bundled(name)
    machine = model.machine if model.machine.nics else with_nics(model.machine)
    others = [renamed(machine, model.knowledge, seed) for seed in range(3)]
    assert numbers((machine, model.knowledge), *others) == (0, 0, 0, 0)


def test_bundled_machines_are_different_classes():
    models = [load_bundled(name) for name in bundled_names()]
    pairs = [(one.machine, one.knowledge) for one in models]
    found = cluster_of(reports(*pairs, *pairs))
    assert list(found.host_classes.values()) == [*range(len(pairs)), *range(len(pairs))]
    assert len({one.name for one in found.classes}) == len(pairs)


def slower(machine: Machine) -> Machine:
    gpus = (*machine.gpus[:-1], replace(machine.gpus[-1], link=PciLink(speed_gts=16.0, width=8)))
    return replace(machine, gpus=gpus)


def swapped(machine: Machine) -> Machine:
    """GPUs 0 and 3 in each other's places: the same shape, with other numbers."""
    first, last = machine.gpus[0], machine.gpus[-1]
    gpus = (
        replace(first, parent=last.parent),
        *machine.gpus[1:-1],
        replace(last, parent=first.parent),
    )
    return replace(machine, gpus=gpus)


@pytest.mark.parametrize(
    "other",
    [
        with_nics(toy_machine(gpus=3, numa_nodes=2, per_switch=2)),
        with_nics(toy_machine(gpus=4, numa_nodes=1, per_switch=2)),
        with_nics(toy_machine(gpus=4, numa_nodes=2)),
        with_nics(toy_machine(gpus=4, numa_nodes=2, per_switch=2), count=1),
        with_nics(toy_machine(gpus=4, numa_nodes=2, per_switch=2), names="ib{}"),
        slower(SWITCHED),
        swapped(SWITCHED),
        replace(SWITCHED, nvlinks=(NvLink(source="G0", target="G1", count=2),)),
        replace(SWITCHED, nics=(replace(SWITCHED.nics[0], speed_mbps=100_000), SWITCHED.nics[1])),
        replace(SWITCHED, nics=(SWITCHED.nics[0], replace(SWITCHED.nics[1], parent="C0"))),
        replace(SWITCHED, gpus=tuple(replace(gpu, sm=90) for gpu in SWITCHED.gpus)),
        replace(SWITCHED, numa_nodes=tuple(replace(n, vendor="x") for n in SWITCHED.numa_nodes)),
    ],
)
def test_structure_splits_classes(other):
    assert numbers(SWITCHED, other, SWITCHED, other) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    "knowledge",
    [
        Knowledge(peer_access_default=False),
        Knowledge(
            peer_access=(PeerAccess(source=0, target=1, supported=False, provenance="reported"),)
        ),
        Knowledge(
            hidden_links=(
                HiddenLink(one="0000:80:00.0", other="0000:81:00.0", provenance="published"),
            )
        ),
    ],
)
def test_knowledge_splits_classes(knowledge):
    assert numbers(SWITCHED, (SWITCHED, knowledge), (SWITCHED, knowledge)) == (0, 1, 1)


def test_bridges_that_lead_nowhere_split_no_class():
    empty = PciBridge(bus_id="0000:f0:00.0", parent="C0")
    below = PciBridge(bus_id="0000:f1:00.0", parent="0000:f0:00.0")
    more = replace(SWITCHED, bridges=(empty, *SWITCHED.bridges, below))
    link = HiddenLink(one="0000:f1:00.0", other="0000:80:00.0", provenance="reported")
    known = Knowledge(hidden_links=(link,))
    assert numbers(SWITCHED, more, (more, known)) == (0, 0, 0)


def test_bridges_in_a_row_keep_their_order():
    def row(*vendors: str) -> Machine:
        parents = ("C0", *(f"0000:0{i}:00.0" for i in range(len(vendors))))
        bridges = tuple(
            PciBridge(bus_id=parents[i + 1], parent=parents[i], vendor=vendor)
            for i, vendor in enumerate(vendors)
        )
        machine = toy_machine(gpus=1)
        gpu = replace(machine.gpus[0], parent=parents[-1], bus_id="0000:99:00.0")
        return check(replace(machine, bridges=bridges, gpus=(gpu,)), where="test")

    assert numbers(row("a", "b"), row("b", "a"), row("a"), row("a", "b")) == (0, 1, 2, 0)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.integers(0, 10**6))
def test_toy_machines_under_other_names_are_one_class(gpus, nodes, per_switch, seed):
    machine = with_nics(toy_machine(gpus=gpus, numa_nodes=nodes, per_switch=per_switch))
    other, _ = renamed(machine, Knowledge(), seed)
    assert canonical(machine, Knowledge()) == canonical(other, Knowledge())


def test_class_names_are_unique_and_fit_for_files():
    names = ["../x", "x", "-x", "a b", "", "\x1b[31m", "n" * 500]
    machines = [replace(toy_machine(gpus=i + 1), name=name) for i, name in enumerate(names)]
    found = cluster_of(reports(*machines)).classes
    assert [one.name for one in found[:6]] == ["x", "x-2", "x-3", "a-b", "node", "31m"]
    assert len(found[6].name) <= 64


def test_ten_thousand_reports_are_grouped_with_few_calls():
    model = load_bundled("nvswitch-8gpu-8nic")
    hosts = [
        HostReport(
            host=f"n{i}",
            machine=replace(model.machine, name=f"n{i}"),
            knowledge=model.knowledge,
        )
        for i in range(10_000)
    ]
    with calls_at_most(7_000_000):
        assert len(cluster_of(hosts).classes) == 1


# Clusters


def leaf(*hosts: str) -> SwitchTree:
    return SwitchTree(name="leaf", hosts=hosts)


CLUSTER = cluster_of(
    [
        HostReport(host="b", machine=toy_machine(gpus=2)),
        HostReport(host="a", machine=toy_machine(gpus=4), slots=3),
        HostReport(host="c", machine=toy_machine(gpus=2)),
    ],
    switches=SwitchTree(name="", hosts=("c",), switches=(leaf("a", "b"),)),
    rails="only",
)


def test_a_cluster_knows_its_ranks():
    assert CLUSTER.names == ("b", "a", "c")
    assert CLUSTER.host_classes == {"b": 0, "a": 1, "c": 0}
    assert CLUSTER.ranks == 7
    assert CLUSTER.classes[CLUSTER.hosts[1].node_class].machine == toy_machine(gpus=4)


def test_a_cluster_is_read_back():
    text = encode_json(CLUSTER)
    assert cluster_from_json(text, where="cluster.json") == CLUSTER


def cluster_from_json(text, *, where):
    return check_cluster(decode_json(text, Cluster, where=where), where=where)


BOX = NodeClass(name="box", machine=toy_machine(gpus=2))
BARE = NodeClass(name="bare", machine=replace(toy_machine(gpus=1), gpus=()))


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"hosts": ()}, ["0 hosts"]),
        ({"hosts": (("a", 0, 1), ("a", 0, 1))}, ["names host a twice"]),
        ({"hosts": (("a/b", 0, 1),)}, ["'a/b'"]),
        ({"hosts": (("a", 2, 1),)}, ["host a is of class 2", "2 classes"]),
        ({"hosts": (("a", -1, 1),)}, ["host a is of class -1"]),
        ({"hosts": (("a", 1, 1),)}, ["bare, which has no GPU"]),
        ({"hosts": (("a", 0, 3),)}, ["host a has 3 ranks", "1 to 2"]),
        ({"hosts": (("a", 0, 0),)}, ["host a has 0 ranks"]),
        ({"classes": (BOX, BOX)}, ["'box'", "twice"]),
        ({"classes": (replace(BOX, name="../x"),)}, ["'../x'"]),
        ({"switches": leaf()}, ["host a is at no switch"]),
        ({"switches": leaf("a", "b")}, ["'b' of the switches is unknown"]),
        ({"switches": leaf("a", "a")}, ["a is at the switches"]),
        (
            {"switches": SwitchTree(name="leaf", switches=(leaf("a"),))},
            ["names switch leaf twice"],
        ),
        ({"switches": SwitchTree(name="\x1b[m", hosts=("a",))}, ["cannot be a name"]),
        ({"switches": SwitchTree(name="s", switches=(replace(leaf("a"), name=""),))}, ["''"]),
        ({"format_version": 2}, ["version 2"]),
        (
            {"classes": (replace(BOX, machine=replace(BOX.machine, numa_nodes=())),)},
            ["'box'", "no NUMA node"],
        ),
    ],
)
def test_clusters_that_are_refused(fields, parts):
    hosts = tuple(
        Host(name=name, node_class=number, slots=slots)
        for name, number, slots in fields.get("hosts", (("a", 0, 1),))
    )
    cluster = Cluster(**{"classes": (BOX, BARE), **fields, "hosts": hosts})
    refused(lambda: check_cluster(cluster, where="cluster.json"), "cluster.json", *parts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        "{}",
        encode_json(CLUSTER).replace('"rails": "only"', '"rails": "both"'),
        encode_json(CLUSTER).replace('"rails"', '"evil"'),
        encode_json(CLUSTER).replace('"slots": 3', '"slots": 30'),
        encode_json(CLUSTER).replace('"name": "c"', '"name": "b"'),
    ],
)
def test_json_that_is_no_cluster(text):
    refused(lambda: cluster_from_json(text, where="cluster.json"), "cluster.json")


def test_a_tree_as_deep_as_json_can_be_is_refused():
    tree = '{"name":"s","switches":[' * 50_000 + "]}" * 50_000
    text = f'{{"hosts":[],"classes":[],"switches":{tree}}}'
    refused(lambda: cluster_from_json(text, where="cluster.json"), "cluster.json")


@pytest.mark.parametrize(("gbps", "count"), [(25, 0), (100, 0), (200, 1), (800, 1)])
def test_an_uplink_that_is_said_to_carry_more_than_all_nics_below_it_is_doubted(gbps, count):
    nics = tuple(Nic(index=i, name=f"m{i}", parent="C0", speed_mbps=200_000) for i in range(2))
    machine = msgspec.structs.replace(load_bundled("h200x4-vm").machine, nics=nics)
    hosts = tuple(Host(name=f"h{i}", node_class=0, slots=4) for i in range(4))
    pair = [SwitchTree(name=n, hosts=(f"h{2 * i}", f"h{2 * i + 1}")) for i, n in enumerate("ab")]
    tree = SwitchTree(
        name="core", switches=(msgspec.structs.replace(pair[0], uplink_gbps=gbps), pair[1])
    )
    classes = (NodeClass(name="box", machine=machine),)
    said = list(doubtful_uplinks(Cluster(hosts=hosts, classes=classes, switches=tree)))
    assert len(said) == count
    assert all(f"{gbps} GB/s" in one and "800 Gbit/s" in one for one in said)
