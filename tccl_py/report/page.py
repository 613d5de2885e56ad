"""The HTML page: a plan's directory through the templates, with drawings of its rings."""

from __future__ import annotations

import functools
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from tccl_py.errors import InputError, visible
from tccl_py.explain.findings import kind_of
from tccl_py.files import refused
from tccl_py.health.host import listed
from tccl_py.model.machine import Machine
from tccl_py.model.transfer import Flow
from tccl_py.nccl.paths import path_types
from tccl_py.nccl.settings import environment
from tccl_py.nccl.variables import env_sh, pinned_env_text
from tccl_py.plan.plan import WORLD, Plan, PlanChain
from tccl_py.plan.words import CHOICE_WORDS, gpu_list, mark, order_words, plan_name, settings_words
from tccl_py.report.contents import (
    Contents,
    HeatMap,
    Reading,
    cell_style,
    cell_text,
    heat_maps,
    rate_bars,
    rate_sources,
    settings_bars,
    viridis,
    worst_pairs,
)
from tccl_py.report.evaluation import ratio_maps
from tccl_py.report.machine import (
    LANE,
    Layout,
    NvLinks,
    Wire,
    depth,
    lay_out,
    link_words,
    machine_sentence,
    nvlinks,
    wires,
)

# Rings as drawings below a machine: every hop a line with a rate, the slowest marked.


_SAME = 1e-6
_PORT = 9.0
_PATHS = {
    "NVL": "over NVLink",
    "NVB": "over NVLink through another GPU",
    "C2C": "chip to chip",
    "PIX": "over one PCI bridge",
    "PXB": "over several PCI bridges",
    "PHB": "over the CPU",
    "SYS": "over two CPUs or NUMA nodes",
}


class DrawnHop(msgspec.Struct, frozen=True, kw_only=True):
    """A hop from device to device: `kind` is write, read or bounce, `path` a path type or memory.

    `wire` is its line, with the upper end at `top` and the lane at `y`.
    """

    source: str
    target: str
    flow: Flow
    gbps: float
    kind: str
    path: str
    slowest: bool
    wire: Wire
    top: float
    y: float

    @property
    def words(self) -> str:
        """The mechanism and the path in words."""
        return f"{kind_of(self.flow)}, {self.path}"


class RingView(msgspec.Struct, frozen=True, kw_only=True):
    """A ring, or a ring's chain on some hosts; `paths` explains the words below hops."""

    id: str
    title: str
    order: str
    rate: float
    layout: Layout
    hops: tuple[DrawnHop, ...]
    bottom: float
    paths: str
    description: str


def ring_views(plan: Plan, number: int, layout: Layout) -> list[RingView]:
    """Return the plan's different rings on hosts of a class, drawn below its machine."""
    machine = plan.cluster.classes[number].machine
    return [
        _view(machine, chain, (place, at), layout, plan)
        for place, path in enumerate(plan.paths)
        if path.node_class == number
        for at, chain in enumerate(path.chains)
    ]


def _view(
    machine: Machine, ring: PlanChain, place: tuple[int, int], layout: Layout, plan: Plan
) -> RingView:
    path, number = place
    hops = drawn_hops(machine, ring, layout)
    hosts = tuple(host.name for host in plan.hosts if host.path == path)
    slow = ", ".join(f"{hop.source} to {hop.target}" for hop in hops if hop.slowest)
    used = {hop.path for hop in hops}
    paths = [f"{path} {meaning}" for path, meaning in _PATHS.items() if path in used]
    paths += [f"{path} through that NUMA node's memory" for path in sorted(used - set(_PATHS))]
    order = order_words(ring.gpus)
    if ring.entry_nic is not None:
        order = " → ".join([f"N{ring.entry_nic}", *map(str, ring.gpus), f"N{ring.exit_nic}"])
    return RingView(
        id=f"ring-{path}-{number}",
        title=f"Ring {number}" + (f" on {listed(hosts)}" if plan.is_cluster else ""),
        order=order,
        rate=ring.rate,
        layout=layout,
        hops=hops,
        bottom=layout.bottom + depth([hop.wire for hop in hops]),
        paths="; ".join(paths),
        description=f"{order}; {ring.rate:.2f} GB/s, {plan.provenance}. "
        + (f"The slowest: {slow}." if slow else "All hops have the same rate.")
        + " The table below lists every hop.",
    )


def drawn_hops(machine: Machine, ring: PlanChain, layout: Layout) -> tuple[DrawnHop, ...]:
    """Return the hops of a ring; none is the slowest where all have one rate."""
    rates = [hop.gbps for hop in ring.hops]
    limit = ring.rate * (1 + _SAME)
    ends = [
        (
            f"N{ring.entry_nic}" if hop.source == WORLD else f"G{hop.source}",
            f"N{ring.exit_nic}" if hop.target == WORLD else f"G{hop.target}",
        )
        for hop in ring.hops
    ]
    ports = [(layout.boxes[a].middle + _PORT, layout.boxes[b].middle - _PORT) for a, b in ends]
    nics = machine.nics if ring.entry_nic is not None else ()
    leaves = [*(gpu.id for gpu in machine.gpus), *(nic.id for nic in nics)]
    found = wires(ports, layout.gaps(leaves))
    return tuple(
        DrawnHop(
            source=source,
            target=target,
            flow=hop.flow,
            gbps=hop.gbps,
            kind=_kind(hop.flow),
            path=_path(machine, hop.flow),
            slowest=hop.gbps <= limit < max(rates),
            wire=wire,
            top=layout.boxes[source].bottom,
            y=layout.bottom + LANE * wire.lane + LANE / 2,
        )
        for hop, (source, target), wire in zip(ring.hops, ends, found, strict=True)
    )


def _kind(flow: Flow) -> str:
    if flow.is_network:
        return "net"
    return "bounce" if flow.is_bounce else flow.transfers[0].operation


def _path(machine: Machine, flow: Flow) -> str:
    for part in flow.transfers[:-1]:
        if part.destination.kind == "C":
            return f"via {part.destination}"
    return path_types(machine)[str(flow.source), str(flow.destination)].name


def default_rings(plan: Plan) -> Counter[str]:
    """Return the orders of default NCCL's rings on one host, with their numbers of channels."""
    if plan.is_cluster:
        return Counter()
    turned = (
        ring[ring.index(min(ring)) :] + ring[: ring.index(min(ring))] for ring in plan.stock.rings
    )
    return Counter(map(order_words, turned))


def drawn_kinds(rings: Sequence[RingView]) -> set[str]:
    """Return the kinds of lines in the drawings of rings."""
    hops = [hop for ring in rings for hop in ring.hops]
    slow = {"write slowest"} if any(hop.slowest for hop in hops) else set()
    return {hop.kind for hop in hops} | slow


_MOST_HOSTS = 64
"""More hosts are not all listed; `nccl/order/hosts.txt` has them."""
REPORT_FILE = "report.html"
_HEAD_BYTES = 2000
_GENERATOR = '<meta name="generator" content="tccl report">'
"""Near the top of every report, to distinguish it from other files."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the plan, or of a class of its hosts, with the rings and rates on it."""

    id: str
    name: str
    machine: Machine
    gpus: tuple[int, ...]
    gpu_names: list[str]
    layout: Layout
    nvlinks: NvLinks
    sentence: str
    rings: list[RingView]
    maps: list[HeatMap]
    worst: list[Reading]


def report_html(contents: Contents) -> str:
    """Return the report on a plan's directory, as one HTML document."""
    plan, found = contents.plan, contents.explanation
    nodes = [_node(contents, number) for number in range(len(plan.cluster.classes))]
    return (
        _templates()
        .get_template("report.html")
        .render(
            generator=Markup(_GENERATOR),
            plan=plan,
            name=plan_name(plan),
            contents=contents,
            # Facts
            facts=_first_line(plan),
            gpus="" if plan.is_cluster else gpu_list(plan.gpus),
            choice_words=CHOICE_WORDS,
            mark=plan.provenance,
            stock_mark=mark(simulated=plan.simulated, assumed=plan.stock.assumed),
            explanation_mark=found and mark(simulated=found.simulated, assumed=found.assumed),
            proof=plan.proof,
            notices=_notices(contents),
            variables=environment(plan.settings),
            exports=env_sh(plan.job_settings),
            directory=shlex.quote(str(contents.directory)),
            # Drawings
            nodes=nodes,
            kinds=drawn_kinds([ring for node in nodes for ring in node.rings]),
            rates=rate_bars(plan, contents.achieved),
            searched=settings_bars(plan),
            ratios=ratio_maps(contents.evaluation) if contents.evaluation else [],
            gradient=[viridis(step / 10) for step in range(11)],
            # Tables
            most_hosts=_MOST_HOSTS,
            default_rings=default_rings(plan),
            sources=rate_sources(contents),
        )
    )


def _node(contents: Contents, number: int) -> NodeView:
    plan = contents.plan
    part, gpus = plan.cluster.classes[number], plan.class_gpus[number]
    machine, layout = part.machine, lay_out(part.machine, gpus)
    journal = contents.journal.measurements if contents.journal is not None else {}
    hosts = {name for name, at in plan.cluster.host_classes.items() if at == number}
    # Sets without host names, as a simulated cluster has, are about equal hosts.
    hosts |= {""} if len(plan.cluster.classes) == 1 else set()
    return NodeView(
        id=f"machine-{number}",
        name=part.name if plan.is_cluster else "",
        machine=machine,
        gpus=gpus,
        gpu_names=sorted({gpu.name for gpu in machine.gpus if gpu.name}),
        layout=layout,
        nvlinks=nvlinks(machine, layout),
        sentence=machine_sentence(machine),
        rings=ring_views(plan, number, layout),
        maps=heat_maps(journal, gpus, tuple(node.index for node in machine.numa_nodes), hosts),
        worst=worst_pairs(journal, hosts=hosts),
    )


@functools.cache
def _templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("tccl_py.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "gbps": "{:.2f}".format,
        "px": lambda pixels: f"{round(pixels, 1):g}",
        "order": order_words,
        "cell_style": cell_style,
        "cell_text": cell_text,
        "link_words": link_words,
    }
    return templates


def _visible(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(visible(line) for line in value.split("\n"))
    return value


def _first_line(plan: Plan) -> list[str]:
    """Return the machine, its GPUs, and the settings."""
    unchecked = "" if plan.settings_verified else " (a version that was not checked)"
    if plan.is_cluster:
        gpus = f"{sum(len(plan.gpus_of(host)) for host in plan.hosts)} GPUs"
    else:
        count, there = len(plan.gpus), len(plan.machine.gpus)
        some = f" of {there}" if count < there else ""
        gpus = f"{count}{some} GPUs ({gpu_list(plan.gpus)})"
    return [
        plan_name(plan),
        gpus,
        f"NCCL {plan.settings.version}{unchecked}",
        settings_words(plan.settings),
        *([pinned_env_text(plan.pinned_env)] if plan.pinned_env else []),
    ]


def _notices(contents: Contents) -> tuple[str, ...]:
    stopped = ("the search was interrupted: this is the best until then",)
    cancelled = stopped if contents.plan.cancelled else ()
    return (*cancelled, *contents.plan.notices, *contents.notices)


def check_replaceable(target: Path, directory: Path, *, force: bool) -> None:
    """Refuse to replace a file that is no report; outside of `directory`, `force` allows it."""
    # Unlike Path.resolve, it bears links that lead in circles.
    inside = Path(os.path.realpath(target)).is_relative_to(os.path.realpath(directory))
    if force and not inside:
        return
    with refused(target, "cannot be read", "name another file"):
        if not target.is_file():
            return
        with target.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    if head and _GENERATOR.encode() not in head:
        right = "name another file" if inside else "name another file, or add --force to replace it"
        raise InputError(str(target), "is no report of tccl", right)
