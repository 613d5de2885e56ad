"""Plans that several tests look at, each made once."""

import functools

import msgspec

from tccl_py.model.cluster import NodeClass, class_name, single_host
from tccl_py.plan.chains import CHOICES
from tccl_py.plan.staging import MANIFEST_FILE, read_manifest, with_manifest
from tccl_py.planning.planner import make_plan
from tccl_py.planning.request import PlanRequest, Task
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import bundled_names, load_bundled
from tccl_py.sources.bench import bench_of

SEVERAL_GPUS = tuple(n for n in bundled_names() if len(load_bundled(n).machine.gpus) > 1)
"""The bundled machines of which one is enough for a ring."""
SMALL = "h200x4-vm"
PCIE = "amd-3090"
FOUR_GPUS = (PCIE, "amd-v100", SMALL, "intel-v100")
ASUS = "asus-esc8000a-e13p"
WRX = "wrx90-16gpu-4switch"
FEW = Budget(sets=1400, idle_sets=20)
WRX_BUDGET = Budget(sets=40, idle_sets=5)
"""A whole plan of 16 GPUs takes half a minute; a small one shows the same things."""


@functools.cache
def plan_of(name, **more):
    """The plan of a bundled machine, by simulation, with rings for all smaller sets of 8 GPUs."""
    defaults = {"budget": WRX_BUDGET} if name == WRX else {"subsets": True}
    return make_plan(name, **defaults | more)


def task_on(machine, knowledge, source, *, kind=Task, **more):
    """The search on a machine, for NCCL 2.30 and all GPUs if nothing else is said."""
    host = NodeClass(name=machine.name, machine=machine, knowledge=knowledge)
    usual = {"gpus": machine.gpu_indices, "request": PlanRequest(version="2.30")}
    return kind(host=host, source=bench_of(source), **usual | more)


def through(space, subset):
    """The space with the hops through the NUMA nodes that a plan names for a set of GPUs."""
    nodes = dict(zip(subset.gpus, subset.nodes, strict=False))
    return space.only(lambda h: h.flow.through == nodes.get(h.source, h.flow.through))


def replace_plan(plan, **changes):
    """A plan with other fields, other choices by name, or changes of its graph files' choice."""
    ways = {name: plan.choices.get(name) for name in CHOICES}
    ways = {name: changes.pop(name.replace("-", "_"), way) for name, way in ways.items()}
    fields = ("settings", "rate_gbps", "error", "fails", "achieved_gbps", "assumed")
    graph = {name: changes.pop(name) for name in fields if name in changes}
    if "rate_gbps" in graph:
        graph["predicted_gbps"] = graph.pop("rate_gbps")
    ways = {n: msgspec.structs.replace(way, name=n) for n, way in ways.items() if way is not None}
    plan = msgspec.structs.replace(plan, choices=ways, **changes)
    return plan.with_choice("graph", **{"settings": plan.settings} | graph)


def needing_a_graph(plan):
    """A plan whose rings are twice as fast as what NCCL does without a graph file, for all sets."""
    half = plan.rate_gbps / 2
    subsets = tuple(msgspec.structs.replace(one, gains=True) for one in plan.subsets)
    return replace_plan(
        plan,
        default=msgspec.structs.replace(plan.choices["default"], predicted_gbps=half),
        variables=msgspec.structs.replace(plan.choices["variables"], predicted_gbps=half),
        subsets=subsets,
    )


def with_parts(plan, *, machine=None, knowledge=None, gpus=None, rings=None, **changes):
    """A plan of one host with another machine, other GPUs or other rings."""
    machine, knowledge = machine or plan.machine, knowledge or plan.knowledge
    gpus = gpus or plan.gpus
    path = msgspec.structs.replace(plan.paths[0], chains=rings or plan.rings)
    cluster = single_host(machine, knowledge, gpus)
    host = msgspec.structs.replace(plan.hosts[0], name=cluster.names[0])
    return replace_plan(
        plan, cluster=cluster, class_gpus=(gpus,), hosts=(host,), paths=(path,), **changes
    )


def rebind(directory):
    """Give a plan's directory, whose files a test has changed, the manifest of these files."""
    names = [name for name in read_manifest(directory).files if (directory / name).is_file()]
    found = with_manifest({name: (directory / name).read_bytes() for name in names})
    (directory / MANIFEST_FILE).write_text(found[MANIFEST_FILE])


def as_only(model):
    """A model as that of the only class of a plan's hosts."""
    return {class_name(model.machine.name): model}
