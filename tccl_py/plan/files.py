"""The files of a machine's plan for NCCL, each with its provenance on top."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath

from tccl_py.nccl.graph_writer import GraphRings, graph_xml
from tccl_py.nccl.settings import Settings, env_sh, nccl_conf
from tccl_py.nccl.view import NcclView, view
from tccl_py.plan.plan import Plan, SubsetRings, per_channel

GRAPH_FILE = "graph.xml"
HOSTS_FOLDER = "hosts"


def host_graph_file(host: str) -> str:
    """The name of the graph file of one of several hosts, below `nccl/`.

    >>> host_graph_file("gpu01")
    'hosts/gpu01.xml'
    """
    return f"{HOSTS_FOLDER}/{host}.xml"


def subset_file(gpus: Sequence[int]) -> str:
    """The name of the graph file for a communicator over exactly these GPUs.

    >>> subset_file((0, 2, 5))
    'subsets/graph-0-2-5.xml'
    """
    return f"subsets/graph-{'-'.join(str(gpu) for gpu in gpus)}.xml"


def graph_files(plan: Plan) -> dict[tuple[int, ...], str]:
    """Return the graph file (below `nccl/`) of each set of GPUs that the plugin gives one to."""
    if plan.is_cluster or plan.recommended != "graph":
        return {}
    gaining = (subset.gpus for subset in plan.subsets if subset.gains)
    return {plan.gpus: GRAPH_FILE} | {gpus: subset_file(gpus) for gpus in gaining}


_PLUGIN_NOTE = "# The best without placed bounce buffers, which jobs get by `tccl run`.\n"


def machine_files(plan: Plan, directory: Path) -> dict[str, str]:
    """Return names (below `nccl/`) and texts of a machine's files, as they will lie in `directory`.

    Raises InputError: rings that NCCL would not take, or a directory whose path cannot stand in an
    environment variable.
    """
    known, farthest = plan.best_known_gbps, plan.paths[0].type_intra
    files = {GRAPH_FILE: _graph(plan, plan.channel_rings, known, farthest)}
    files |= {subset_file(subset.gpus): subset_graph(plan, subset) for subset in plan.subsets}
    graph = PurePosixPath(directory.resolve() / "nccl" / GRAPH_FILE)
    named = graph if plan.names_graph else None
    env = env_text(plan.plain_settings, named, provenance=plan.provenance)
    return files | settings_files(plan, env)


def settings_files(plan: Plan, env: str) -> dict[str, str]:
    """Return env.sh, which is `env`, and nccl.conf."""
    conf = conf_text(plan.plain_settings, provenance=plan.provenance)
    return {"env.sh": env + _PLUGIN_NOTE * plan.needs_plugin, "nccl.conf": conf}


def subset_graph(plan: Plan, subset: SubsetRings) -> str:
    """Return the graph file of a communicator over some of the plan's GPUs."""
    seen = view(plan.machine, plan.knowledge, plan.settings, gpus=subset.gpus)
    orders = per_channel(subset.rings, plan.settings.channels)
    hops = {pair for ring in subset.rings for pair in pairwise((*ring, ring[0]))}
    return _graph(plan, orders, subset.rate_gbps, seen.farthest(hops))


def _graph(
    plan: Plan, orders: tuple[tuple[int, ...], ...], rate_gbps: float, type_intra: str
) -> str:
    return graph_text(
        orders,
        plan.settings,
        rate_gbps=rate_gbps,
        type_intra=type_intra,
        provenance=plan.provenance,
    )


def class_view(plan: Plan, number: int, settings: Settings) -> NcclView:
    """Return NCCL's view of a host of a class, with the plan's GPUs of it."""
    one = plan.cluster.classes[number]
    return view(one.machine, one.knowledge, settings, gpus=plan.class_gpus[number])


def graph_text(
    orders: Sequence[tuple[int, ...]],
    settings: Settings,
    *,
    rate_gbps: float,
    type_intra: str,
    provenance: str,
) -> str:
    """Return a graph file for one communicator; `orders` has a GPU order for each channel.

    Channels share `rate_gbps` evenly: NCCL's tuner reads a channel's speed. Raises InputError:
    orders or channels that NCCL would not take.
    """
    rings = GraphRings(
        orders=tuple(orders), speed_gbps=rate_gbps / len(orders), type_intra=type_intra
    )
    gpus = ", ".join(str(gpu) for gpu in sorted(orders[0]))
    note = f"rates {provenance}; only for communicators over exactly GPUs {gpus}"
    return f"<!-- tccl-py: {note} -->\n" + graph_xml(rings, version=settings.version)


def conf_text(settings: Settings, *, provenance: str) -> str:
    """Return an nccl.conf with the settings; a graph file is not for every job of a host."""
    head = (
        f"# tccl-py, rates {provenance}. Holds for every job of the host.\n"
        "# No graph file is named here: it fails every communicator over other GPUs.\n"
        "# Jobs that need one get it from env.sh of the plan, from tccl env or by tccl_py.torch.\n"
    )
    return head + nccl_conf(settings)


def env_text(settings: Settings, graph: PurePosixPath | None, *, provenance: str) -> str:
    """Return a script to source in a job over all GPUs of the plan, or in any job without a graph.

    Raises InputError: a file's path is not absolute.
    """
    whose = "For jobs whose communicators use exactly these GPUs."
    if graph is None:
        whose = "For any job on these GPUs; no graph file is needed."
    head = f"# tccl-py, rates {provenance}. {whose}\n"
    lines = env_sh(settings, graph=graph)
    return head + lines + ("unset NCCL_GRAPH_FILE\n" if graph is None else "")
