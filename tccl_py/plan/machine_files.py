"""NCCL's and the plugin's files: their texts, and those of a plan of one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import msgspec

from tccl_py.errors import InputError
from tccl_py.model.machine import Fingerprint
from tccl_py.model.rings import neighbours
from tccl_py.nccl.graph_writer import GraphRings, graph_xml
from tccl_py.nccl.plugin import LIBRARY, found_library
from tccl_py.nccl.plugin.index import (
    INDEX_FILE,
    IndexedGpu,
    IndexedSet,
    PluginIndex,
    plugin_environment,
)
from tccl_py.nccl.settings import Settings, env_rules, env_sh, nccl_conf
from tccl_py.nccl.versions import plain_version
from tccl_py.nccl.view import NcclView, view
from tccl_py.plan.chains import WORLD, PlanChain, SubsetRings, per_channel
from tccl_py.plan.plan import Plan

GRAPH_FILE = "graph.xml"
ANY_HOST = ""
"""The host of a plan of one, whatever its name is."""
ALIKE_INDEX_FILE = "plugin-alike.index"
"""The index of a measured plan for hosts of the same kind, whose GPUs have other UUIDs."""
Tables = Mapping[tuple[int, ...], Sequence[str]]
"""Lines of the tuner for sets of GPUs (`nccl.tuner.tune_lines`)."""


def part_file(plan: Plan, gpus: Sequence[int]) -> str:
    """Return the name of the graph file for a communicator over exactly these GPUs of a host."""
    if tuple(gpus) == plan.gpus:
        return GRAPH_FILE
    return f"subsets/graph-{'-'.join(str(gpu) for gpu in gpus)}.xml"


def placement(plan: Plan, gpus: Sequence[int]) -> dict[int, int]:
    """Return the NUMA node for the host buffers of each GPU of a communicator; {} if none."""
    rings = plan.subset(gpus)
    numa_ids = {node.index: node.numa_id for node in plan.machine.numa_nodes}
    placed = () if rings is None else zip(rings.gpus, rings.nodes, strict=False)
    return {gpu: numa_ids[node] for gpu, node in placed}


def subset_graph(plan: Plan, subset: SubsetRings) -> str:
    """Return the graph file of a communicator over some of the plan's GPUs."""
    host_view = view(plan.machine, plan.knowledge, plan.settings, gpus=subset.gpus)
    hops = {pair for ring in subset.rings for pair in neighbours(ring)}
    return graph_text(
        per_channel(subset.rings, plan.settings.channels),
        plan.settings,
        rate_gbps=plan.best_known_gbps if subset.gpus == plan.gpus else subset.rate_gbps,
        type_intra=host_view.farthest(hops),
        provenance=plan.provenance_of("graph"),
    )


def class_view(plan: Plan, number: int, settings: Settings) -> NcclView:
    """Return NCCL's view of a host of a class, with the plan's GPUs of it."""
    host = plan.cluster.classes[number]
    own = plan.settings_on(number, settings)
    return view(host.machine, host.knowledge, own, gpus=plan.class_gpus[number])


def path_types(host_view: NcclView, chains: Sequence[PlanChain]) -> tuple[str, str]:
    """Return the farthest paths of chains inside a host and to its NICs, "" without, by name."""
    ends = [hop.ends for chain in chains for hop in chain.hops]
    inside = host_view.farthest(pair for pair in ends if WORLD not in pair)
    open_ends = [
        (chain.gpus[0], chain.entry_nic, chain.gpus[-1], chain.exit_nic)
        for chain in chains
        if chain.entry_nic is not None and chain.exit_nic is not None
    ]
    if not open_ends:
        return inside, ""
    from tccl_py.nccl.network import farthest_end  # noqa: PLC0415 (not for one host)

    return inside, farthest_end(host_view, open_ends).name


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
    speed = rate_gbps / len(orders)
    rings = GraphRings(orders=tuple(orders), speed_gbps=speed, type_intra=type_intra)
    note = f"rates {provenance}; only for communicators over exactly GPUs"
    return noted_graph(rings, note, version=settings.version)


def noted_graph(rings: GraphRings, note: str, *, version: str) -> str:
    """Return a graph file with a comment: a note that the GPUs of its rings end."""
    gpus = ", ".join(str(gpu) for gpu in sorted(rings.orders[0]))
    return f"<!-- tccl-py: {note} {gpus} -->\n" + graph_xml(rings, version=version)


def conf_text(settings: Settings, *, provenance: str) -> str:
    """Return an nccl.conf with the settings; a graph file is not for every job of a host."""
    head = (
        f"# tccl-py, rates {provenance}. Holds for every job of the host.\n"
        "# No graph file is named here: it fails every communicator over other GPUs.\n"
        "# Jobs that need one get it from env.sh of the plan, or from tccl env.\n"
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
    if graph is None:
        return f"{head}{lines}unset NCCL_GRAPH_FILE\n"
    # NCCL fails without the file, as where the plan was moved.
    lost = 'echo "tccl: $NCCL_GRAPH_FILE is missing: NCCL chooses its own rings" >&2'
    return f'{head}{lines}[ -r "$NCCL_GRAPH_FILE" ] || {{ {lost}; unset NCCL_GRAPH_FILE; }}\n'


class MachineFiles:
    """NCCL's and the plugin's files of a plan of one host, for all jobs there.

    `graphs` has the graph file, below `nccl/`, that env.sh names on each host; `tables` are lines
    of the tuner.
    """

    for_all_jobs = True
    graphs: Mapping[str, str] = {ANY_HOST: GRAPH_FILE}

    def __init__(self, plan: Plan, tables: Tables | None = None) -> None:
        self.plan, self.tables = plan, tables or {}

    @property
    def sets(self) -> tuple[IndexedSet, ...]:
        """The sets of GPUs whose communicators get something by the plugin, without files' texts.

        These sets gain by the recommended choice: by a graph file, or by variables alone.
        """
        plan = self.plan
        gaining = [part for part in plan.parts.values() if part.gains]
        if plan.is_by_variables and self.variables[1]:
            return tuple(IndexedSet(gpus=part.gpus) for part in gaining)
        return tuple(
            IndexedSet(
                gpus=part.gpus, file=part_file(plan, part.gpus), nodes=placement(plan, part.gpus)
            )
            for part in gaining
            if plan.recommended == "graph" and part.rings
        )

    @property
    def variables(self) -> tuple[dict[str, str], dict[str, str]]:
        """The variables that a job with the plugin needs, and those that the plugin gives."""
        return plugin_environment(self.plan.job_settings)

    def used_on(self, _: str | None) -> None:
        """Return the files of a plan's directory that ranks on a host use: None, which is all."""

    def texts(self, place: PurePosixPath) -> dict[str, str]:
        """Return graph files and env.sh, as they will lie in `place`."""
        plan = self.plan
        parts = [part for part in plan.parts.values() if part.rings]
        files = {part_file(plan, part.gpus): subset_graph(plan, part) for part in parts}
        graph = place / GRAPH_FILE if plan.names_graph else None
        return files | {
            "env.sh": env_text(plan.plain_choice.settings, graph, provenance=plan.provenance)
        }

    def plugin(
        self, texts: Mapping[str, str], fingerprint: Fingerprint | None, directory: Path, **_: bool
    ) -> dict[str, str | bytes]:
        """Return names (below `nccl/` of `directory`) and contents of the plugin's files.

        `texts` are the files of `nccl_files`. There are none for measured GPUs that no UUID
        identifies. The library is the installed one, else one that was built in `directory`, if
        any: nccl.conf may name it.
        """
        plan, files = self.plan, dict[str, str | bytes]()
        measured = None if plan.simulated else fingerprint
        uuids = {} if measured is None else measured.uuids(plan.machine)
        if not (plan.simulated or set(plan.gpus) <= set(uuids)):
            return files
        sets = [
            msgspec.structs.replace(part, text=texts[part.file].encode()) if part.file else part
            for part in self.sets
            if part.file is None or part.file in texts
        ]
        with suppress(InputError):
            index = plugin_index(plan, self.variables, 0, sets, measured)
            index = msgspec.structs.replace(index, tables=self.tables)
            files[INDEX_FILE] = index.encode().decode()
            if measured is not None:
                equal_gpus = tuple(msgspec.structs.replace(gpu, uuid="") for gpu in index.gpus)
                index = msgspec.structs.replace(index, gpus=equal_gpus)
                files[ALIKE_INDEX_FILE] = index.encode().decode()
            if library := found_library(directory / "nccl"):
                files[LIBRARY] = library.read_bytes()
        return files


def plugin_index(
    plan: Plan,
    variables: tuple[Mapping[str, str], Mapping[str, str]],
    number: int,
    sets: Sequence[IndexedSet],
    known: Fingerprint | None = None,
) -> PluginIndex:
    """Return the plugin's index for hosts of a class, with graph files for `sets` of GPUs.

    `variables` are those that jobs need, and those that the plugin gives; `known` is the measured
    host: its GPUs, driver and NUMA nodes have to be there.
    """
    version = plain_version(plan.settings.version)
    machine = plan.cluster.classes[number].machine
    gpus = sorted(machine.gpus, key=lambda gpu: gpu.index)
    uuids = {} if known is None else known.uuids(machine)
    major = "" if known is None else known.driver.partition(".")[0]
    must, forbid = env_rules(plan.settings_on(number, plan.job_settings))
    needed, optional = variables
    return PluginIndex(
        simulated=plan.simulated,
        gpus=tuple(
            IndexedGpu(nvml=gpu.index, bus_id=gpu.bus_id, uuid=uuids.get(gpu.index, ""))
            for gpu in gpus
            if gpu.index in plan.class_gpus[number]
        ),
        sets=tuple(sets),
        needed=needed,
        given=optional,
        must=must,
        forbid=forbid,
        # Rates of a model do not depend on the version, and measured plans hold for their own.
        nccl="" if plan.simulated else ".".join(version.split(".")[:2]),
        driver=int(major) if major.isdecimal() else None,
        numa=None if known is None else known.numa_count,
    )
