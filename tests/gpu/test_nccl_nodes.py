"""Two nodes of one GPU each on one machine: what real NCCL does between nodes, and what we say.

Ranks with different NCCL_HOSTID are on different nodes for NCCL, and talk over its sockets. Needs
two GPUs and torch with NCCL; a second network interface, if there is one, is a second NIC.
"""

import fcntl
import json
import os
import re
import socket
import struct
import sys

import pytest

from tccl_py.model.machine import Knowledge
from tccl_py.nccl.communicators import parse_log, same_rings
from tccl_py.nccl.graph_file import parse_graph_file
from tccl_py.nccl.graph_search import default_rings, search_ring
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.validator import NodeJob, validate_cluster
from tccl_py.nccl.view import view
from tccl_py.plan.host_files import node_graph_text
from tccl_py.readers.nccl_topology import read_nccl_topology
from tests.gpu.ranks import run_ranks

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(300)]
NODES = 2
SIOCGIFADDR = 0x8915
_NET = re.compile(
    r"Channel (?P<channel>\d+)/\d+ : (?P<source>\d+)\[\w+\] -> (?P<target>\d+)\[\w+\] "
    r"\[(?P<way>send|receive)\] via NET/\w+/(?P<nic>\d+)"
)


def interfaces():
    """Interfaces with an address, lo last, so that one machine has more than one NIC if it can."""
    names = [name for _, name in socket.if_nameindex() if has_address(name)]
    return tuple(sorted(names, key=lambda name: (name == "lo", name)))[:2]


def has_address(name):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return False
    return True


def settings(**choices):
    return Settings(socket_ifname=interfaces(), **choices)


def run_nodes(folder, variables, graphs=("", "")):
    """All-reduce over the nodes, each with its file; gives the answers and the text of the logs."""
    environments = []
    for rank, graph in enumerate(graphs):
        own = {
            "NCCL_HOSTID": f"node{rank}",
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,NET",
            "NCCL_DEBUG_FILE": str(folder / f"log{rank}"),
            "NCCL_TOPO_DUMP_FILE": str(folder / f"topology{rank}.xml"),
            "NCCL_TOPO_DUMP_FILE_RANK": str(rank),
            "NCCL_GRAPH_DUMP_FILE": str(folder / f"graph{rank}.xml"),
            "NCCL_GRAPH_DUMP_FILE_RANK": str(rank),
        }
        if graph:
            (folder / f"file{rank}.xml").write_text(graph)
            own["NCCL_GRAPH_FILE"] = str(folder / f"file{rank}.xml")
        environments.append({**os.environ, **variables, **own})
    words = [sys.executable, "-m", "tests.gpu.collective"]
    commands = [[*words, rank, NODES, folder / "meet", 1 << 24, 5] for rank in range(NODES)]
    codes, outputs = run_ranks(commands, environments)
    assert codes == [0] * NODES, outputs
    answers = [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]
    assert all(answer["right"] for answer in answers)
    return [(folder / f"log{rank}").read_text() for rank in range(NODES)]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A run without files: folder, version, and what NCCL saw on each node."""
    folder = tmp_path_factory.mktemp("stock")
    texts = run_nodes(folder, environment(settings()))
    version = parse_log(texts[0], where="log0").version
    machines = [read_nccl_topology(folder / f"topology{rank}.xml") for rank in range(NODES)]
    return folder, version, machines, texts


def judged(machines, version, graphs):
    nodes = [
        NodeJob(machine=node, knowledge=Knowledge(), gpus=node.gpu_indices, graph=graph)
        for node, graph in zip(machines, graphs, strict=True)
    ]
    return validate_cluster(nodes, version=version, environment=environment(settings()))


def nics_in(texts):
    """(channel, rank, way) -> the NIC's device number, of every connection over the network."""
    found = {}
    for match in _NET.finditer("\n".join(texts)):
        rank = match["source"] if match["way"] == "send" else match["target"]
        found[int(match["channel"]), int(rank), match["way"]] = int(match["nic"])
    return found


def assert_as_judged(found, texts):
    """NCCL's rings and NICs are those of the verdict."""
    (rings,) = parse_log(texts[0], where="log0").communicators
    assert len(rings) == len(found.rings)
    assert all(map(same_rings, rings, found.rings))
    nics = nics_in(texts)
    for channel, row in enumerate(found.nics):
        for rank, used in enumerate(row):
            assert nics[channel, rank, "receive"] == used.entry, (channel, rank)
            assert nics[channel, rank, "send"] == used.exit, (channel, rank)


def written(machines, version, ends):
    texts = []
    for node in machines:
        seen = view(node, Knowledge(), settings(version=version), gpus=node.gpu_indices)
        orders = [node.gpu_indices] * len(ends)
        texts.append(node_graph_text(seen, orders, ends, rate_gbps=2.0, provenance="measured"))
    return texts


def test_nccls_own_graphs_are_those_of_the_emulation(stock):
    folder, version, machines, texts = stock
    for rank, node in enumerate(machines):
        dump = parse_graph_file(
            (folder / f"graph{rank}.xml").read_text(), where="dump", version=version
        )
        chosen = settings(version=version)
        ours = default_rings(view(node, Knowledge(), chosen, gpus=node.gpu_indices), nodes=NODES)
        ring, tree = dump[0], dump[1]
        assert (ring.nchannels, ring.crossnic) == (len(ours.chains), ours.cross_nic)
        assert [channel.nets for channel in ring.channels] == [
            (chain.entry, chain.exit) for chain in ours.chains
        ]
        graph = search_ring(view(node, Knowledge(), chosen, gpus=node.gpu_indices), nodes=NODES)
        assert round(ring.speedintra, 2) == round(graph.rate_intra, 2)
        types = (graph.type_intra.name, graph.type_inter.name)
        assert (ring.typeintra, ring.typeinter) == types
        assert tree.pattern == 3
    assert_as_judged(judged(machines, version, ["", ""]), texts)


def test_files_of_two_nodes_give_the_rings_and_nics_that_were_written(stock, tmp_path):
    _, version, machines, _ = stock
    nics = [nic.index for nic in machines[0].nics]
    files = written(machines, version, [(nic, nic) for nic in (*nics, nics[0])])
    texts = run_nodes(tmp_path, environment(settings()), files)
    found = judged(machines, version, files)
    assert found.verdict == "used"
    assert_as_judged(found, texts)


def test_trees_of_these_files_sum_rightly(stock, tmp_path):
    _, version, machines, _ = stock
    nics = [nic.index for nic in machines[0].nics]
    files = written(machines, version, [(nic, nic) for nic in (nics[-1], nics[0])])
    run_nodes(tmp_path, {**environment(settings()), "NCCL_ALGO": "Tree"}, files)


def test_a_node_of_one_gpu_is_left_by_its_entry_whatever_the_file_says(stock, tmp_path):
    _, version, machines, _ = stock
    if len(machines[0].nics) < 2:
        pytest.skip("one network interface: there is no other NIC to name")
    files = written(machines, version, [(0, 0)])
    files = [text.replace('<net dev="0x0"/>', '<net dev="0x1"/>', 1) for text in files]
    texts = run_nodes(tmp_path, environment(settings()), files)
    found = judged(machines, version, files)
    assert found.verdict == "clipped"
    assert_as_judged(found, texts)
    assert {used.exit for row in found.nics for used in row} == {1}
