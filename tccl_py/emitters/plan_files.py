"""What a plan becomes for NCCL: names and texts of files, each with its provenance on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from tccl_py.emitters.graph_xml import GraphRings, graph_xml
from tccl_py.emitters.nccl_conf import env_sh, fits_conf, nccl_conf
from tccl_py.runtimes.nccl.graph_facts import graph_facts
from tccl_py.runtimes.nccl.settings import Settings
from tccl_py.runtimes.nccl.transport import View

GRAPH_FILE = "graph.xml"
TOPOLOGY_FILE = "topo.xml"


def subset_file(gpus: Sequence[int]) -> str:
    """The name of the graph file for a communicator over exactly these GPUs.

    >>> subset_file((0, 2, 5))
    'subsets/graph-0-2-5.xml'
    """
    return f"subsets/graph-{'-'.join(str(gpu) for gpu in gpus)}.xml"


def graph_text(
    orders: Sequence[tuple[int, ...]],
    settings: Settings,
    *,
    rate_gbps: float,
    type_intra: str,
    provenance: str,
) -> str:
    """A graph file for one communicator; `orders` has one GPU order a channel.

    `rate_gbps` is shared evenly by the channels: NCCL's tuner reads a channel's speed.

    Raises:
        InputError: orders or channels that NCCL would not take.
    """
    rings = GraphRings(
        orders=tuple(orders), speed_gbps=rate_gbps / len(orders), type_intra=type_intra
    )
    gpus = ", ".join(str(gpu) for gpu in sorted(orders[0]))
    note = f"rates {provenance}; only for communicators over exactly GPUs {gpus}"
    return f"<!-- tccl-py: {note} -->\n" + graph_xml(rings, version=settings.version)


def node_graph_text(
    seen: View,
    orders: Sequence[tuple[int, ...]],
    ends: Sequence[tuple[int, int]],
    *,
    rate_gbps: float,
    provenance: str,
    network_gbps: float | None = None,
) -> str:
    """The graph file of every node of one class, for a communicator over several nodes.

    Args:
        seen: the node under the job's settings, with the communicator's GPUs on it.
        orders: one GPU order a channel.
        ends: the numbers of the NICs by which each channel enters and leaves.
        rate_gbps: of all channels together; they share it evenly.
        provenance: of that rate.
        network_gbps: what all channels carry between nodes, if that is known and more.

    Raises:
        InputError: orders or NICs that NCCL would not take, or not as they are meant.
    """
    facts = graph_facts(seen, orders, ends)
    count = len(orders)
    rings = GraphRings(
        orders=tuple(orders),
        speed_gbps=rate_gbps / count,
        type_intra=facts.type_intra,
        nets=facts.nets,
        speed_inter_gbps=(rate_gbps if network_gbps is None else network_gbps) / count,
        type_inter=facts.type_inter,
        tree_nets=facts.tree_nets,
        tree_type_inter=facts.tree_type_inter,
        tree_spreads=facts.tree_spreads,
    )
    gpus = ", ".join(str(gpu) for gpu in sorted(orders[0]))
    note = f"rates {provenance}; for one node of several, with exactly these GPUs of it: {gpus}"
    return f"<!-- tccl-py: {note} -->\n" + graph_xml(rings, version=seen.settings.version)


def conf_text(settings: Settings, *, provenance: str, topology: PurePosixPath | None = None) -> str:
    """An nccl.conf with the settings, and with the topology file if there is one.

    It names no graph file, because that is not for every job; a topology file is, as it only tells
    NCCL's own search what links carry.
    """
    head = (
        f"# tccl-py, rates {provenance}. Holds for every job of the host.\n"
        "# No graph file is named here: it fails every communicator over other GPUs.\n"
        "# Jobs that need one get it from env.sh of the plan, from tccl env or by tccl_py.torch.\n"
    )
    if topology is not None and not fits_conf(topology):
        head += "# The topology file is left to env.sh too: its path needs quotes, unknown here.\n"
        topology = None
    elif topology is not None:
        head += (
            "# NCCL_TOPO_FILE makes NCCL's own search see what was measured, for any GPUs of this\n"
            "# host. It describes this host alone: elsewhere, or with other cards, leave it out.\n"
        )
    return head + nccl_conf(settings, topology=topology)


def env_text(
    settings: Settings,
    graph: PurePosixPath | None,
    *,
    provenance: str,
    topology: PurePosixPath | None = None,
) -> str:
    """A script to source in a job: one that uses all GPUs of the plan, if there is a graph file.

    Raises:
        InputError: a file's path is not absolute.
    """
    whose = "For jobs whose communicators use exactly these GPUs."
    if graph is None:
        whose = "For any job on these GPUs; no graph file is needed."
    head = f"# tccl-py, rates {provenance}. {whose}\n"
    lines = env_sh(settings, graph=graph, topology=topology)
    return head + lines + ("unset NCCL_GRAPH_FILE\n" if graph is None else "")
