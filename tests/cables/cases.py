"""Planned clusters of hosts that cables join.

`python -m tests.cables.cases FOLDER` writes them for `judge.py`.
"""

import json
import shutil
import sys
from itertools import combinations
from pathlib import Path, PurePosixPath

from tccl_py.model.cluster import Cable, Cluster, Host, NodeClass, check_cluster
from tccl_py.nccl.connections import default_channels
from tccl_py.nccl.graph_search import default_rings
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.view import view
from tccl_py.plan.host_files import ClusterFiles
from tccl_py.planning.cables import own_pairs
from tccl_py.planning.planner import make_cluster_plan
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.cables.network import PORTS, build

MODEL = load_bundled("gb10-2port")
SINGLE = tuple((nic,) for nic in range(4))
"""Four ports of a function each, in the place of two ports of two."""


def cluster(cables, hosts=3, ports=PORTS):
    """Return hosts with cables (host, port, host, port)."""
    names = [f"spark{number}" for number in range(hosts)]
    node_class = NodeClass(name="spark", machine=MODEL.machine, knowledge=MODEL.knowledge)
    joined = tuple(Cable.between(names[a], ports[x], names[b], ports[y]) for a, x, b, y in cables)
    made = Cluster(
        hosts=tuple(Host(name=name, node_class=0, slots=1) for name in names),
        classes=(node_class,),
        cables=joined,
    )
    return check_cluster(made, where="cluster")


def planned(cables, hosts=3, ports=PORTS, **options):
    return make_cluster_plan(cluster(cables, hosts, ports), [Simulator(MODEL)], **options)


def ring(hosts=3, leave=0):
    return [(host, leave, (host + 1) % hosts, 1 - leave) for host in range(hosts)]


MIRRORED = [(0, 0, 1, 0), (1, 1, 2, 1), (2, 0, 0, 1)]
DOUBLED = [(0, 0, 1, 1), (0, 1, 1, 0)]


def at_next_ports(pairs):
    """Return a cable for each pair of hosts, at the next free port of each."""
    used: dict[int, int] = {}
    cables = []
    for pair in pairs:
        ends = [(host, used.setdefault(host, 0)) for host in pair]
        used |= {host: port + 1 for host, port in ends}
        cables.append((*ends[0], *ends[1]))
    return cables


def torus(rows=2, columns=4):
    """Return the pairs of hosts of a torus; two rows are joined twice."""
    place = [divmod(number, columns) for number in range(rows * columns)]
    along = [(n, r * columns + (c + 1) % columns) for n, (r, c) in enumerate(place)]
    across = [(n, (r + 1) % rows * columns + c) for n, (r, c) in enumerate(place)]
    return along + across


CLUSTERS = {
    "ring of 3": (ring(), 3, PORTS),
    "ring of 3, hand-made": (ring(3, 1), 3, PORTS),
    "ring of 3 the other way, hand-made": (ring(), 3, PORTS),
    "3 hosts, ports mirrored": (MIRRORED, 3, PORTS),
    "2 hosts, one cable": ([(0, 0, 1, 1)], 2, PORTS),
    "2 hosts, two cables": (DOUBLED, 2, PORTS),
    "ring of 4": (ring(4), 4, PORTS),
    "full mesh of 4": (at_next_ports(combinations(range(4), 2)), 4, SINGLE),
    "ring of 6": (ring(6), 6, PORTS),
    "torus of 2x4": (at_next_ports(torus()), 8, SINGLE),
}
MEASURED_FILE = [(0, 1), (2, 3)] * 4
"""Channels of the public file, which names the NIC of the entry and that of the exit."""


def hand_made():
    parts = "".join(
        f'<channel><net dev="{a}"/><gpu dev="0"/><net dev="{b}"/></channel>'
        for a, b in MEASURED_FILE
    )
    return (
        '<graphs version="1"><graph id="0" pattern="4" crossnic="1" nchannels="8" '
        'speedintra="0.24" speedinter="0.24" latencyinter="0" typeintra="LOC" typeinter="P2C" '
        f'samechannels="1">{parts}</graph></graphs>\n'
    )


def cabled(cluster, rank_of):
    """Return the cables between functions, with hosts by rank."""
    return [
        (rank_of[a.host], x, rank_of[b.host], y)
        for a, b in (cable.ends for cable in cluster.cables)
        for x, y in zip(a.nics, b.nics, strict=True)
    ]


def case(name, plan, folder):
    """Write a plan's graph files; return what the judge needs."""
    order = {host: rank for rank, host in enumerate(plan.host_order)}
    texts = ClusterFiles(plan).texts(PurePosixPath("/plan"))
    place = folder / name.replace(" ", "-")
    place.mkdir(parents=True)
    for host, rank in order.items():
        text = hand_made() if "hand-made" in name else texts[f"hosts/{host}.xml"]
        (place / f"{rank}.xml").write_text(text)
    chains = [plan.paths[host.path].chains for host in plan.hosts]
    count = len(chains)
    return {
        "name": name,
        "hosts": count,
        "folder": place.name,
        "cables": cabled(plan.cluster, order),
        "variables": environment(plan.choices["graph"].settings),
        # NCCL doubles the channels of a file.
        "channels": 0 if "hand-made" in name else 2 * plan.settings.channels,
        "hops": hops_of([[(c.entry_nic, c.exit_nic) for c in each] for each in chains]),
    }


def hops_of(ends):
    """Return the hops of channels from each rank to the next, by their NICs in and out."""
    return sorted(
        {
            (rank, out, (rank + 1) % len(ends), into)
            for rank, here in enumerate(ends)
            for (_, out), (into, _) in zip(here, ends[(rank + 1) % len(ends)], strict=True)
        }
    )


def by_variables(graph_case, cables, hosts, ports):
    """Return the case of NCCL's own rings over the same hosts, without a graph file."""
    joined = cluster(cables, hosts, ports)
    seen = view(MODEL.machine, MODEL.knowledge, Settings(), gpus=(0,))
    own = default_rings(seen, nodes=hosts)
    channels = default_channels(seen, own.chains, own.cross_nic)
    return graph_case | {
        "name": f"{graph_case['name']}, by variables alone",
        "folder": "",
        "channels": 0,
        "cables": cabled(joined, {host: rank for rank, host in enumerate(joined.names)}),
        "hops": hops_of(own_pairs(joined, [channels] * hosts, subnet_routing=True)),
    }


def main(folder):
    """Write the cases: plans that work, and such that have to fail by name."""
    shutil.rmtree(folder, ignore_errors=True)
    cases = []
    for name, (cables, hosts, ports) in CLUSTERS.items():
        plan = planned(cables, hosts, ports)
        cases.append(case(name, plan, folder))
        if plan.choices["variables"].rate_gbps is not None and "hand-made" not in name:
            cases.append(by_variables(cases[-1], cables, hosts, ports))
    by_name = {one["name"]: one for one in cases}
    wrong = by_name["ring of 3"] | {"name": "ring of 3, a cable at another port", "hops": []}
    swapped = {(1, 0): (1, 1), (1, 1): (1, 0), (1, 2): (1, 3), (1, 3): (1, 2)}
    wrong["cables"] = [
        (*swapped.get((a, x), (a, x)), *swapped.get((b, y), (b, y)))
        for a, x, b, y in wrong["cables"]
    ]
    without = by_name["ring of 3"] | {"name": "ring of 3, without subnets", "hops": []}
    without["variables"] = {**without["variables"], "NCCL_IB_SUBNET_AWARE_ROUTING": "0"}
    all_at_once = by_name["ring of 4"] | {"name": "ring of 4, trees connected too", "hops": []}
    all_at_once["variables"] = {**all_at_once["variables"], "NCCL_RUNTIME_CONNECT": "0"}
    cases += [wrong, without, all_at_once]
    (folder / "cases.json").write_text(json.dumps(cases, indent=1))
    build(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
