"""Plans of clusters, put together by hand from nodes that are small."""

import msgspec

from tccl_py.model.machine import Knowledge
from tccl_py.model.reports import HostReport, cluster_of
from tccl_py.nccl.network import chain_hop_space, chains_as_rings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import view
from tccl_py.plan.chains import Choice, HostPath, PlanChain, PlanHop, PlannedHost
from tccl_py.plan.load import check_plan
from tccl_py.plan.plan import Plan
from tests.nccl_nodes import with_nics
from tests.planned import replace_plan
from tests.toy import toy_machine

NOTHING = Knowledge()
ONE = with_nics(toy_machine(gpus=1, name="one"), {0: "G0", 1: "G0"})
PAIR = with_nics(toy_machine(gpus=2, numa_nodes=2, name="pair"), {0: "G0", 1: "G1"})
FOUR = with_nics(toy_machine(gpus=4, numa_nodes=2, per_switch=2, name="four"), {0: "G0", 1: "G2"})
MACHINES = (ONE, PAIR, FOUR)
RATE = 10.0
LOCAL = {"net_disable_intra": True}
"""Or GPUs of two switches talk by their NICs, which is no hop of a chain."""


def path_of(number, machine, chains, settings, *, gpus=None):
    """A host path; chains are (entry NIC, GPUs, exit NIC), hop n of chain c has rate 20 + n + c."""
    space = chain_hop_space(view(machine, NOTHING, settings, gpus=gpus), chains_in_set=len(chains))
    made = []
    for place, (chain, found) in enumerate(
        zip(chains, chains_as_rings(space, chains), strict=True)
    ):
        hops = tuple(
            PlanHop(source=hop.source, target=hop.target, flow=hop.flow, rate_gbps=20.0 + n + place)
            for n, hop in enumerate(found.hops)
        )
        made.append(PlanChain(hops=hops, entry_nic=chain[0], exit_nic=chain[2]))
    return HostPath(node_class=number, chains=tuple(made), type_intra="PHB", type_inter="PHB")


def cluster_plan(hosts, chains, *, order=None, gpus=None, settings=None, **changes):
    """The plan of a cluster.

    `hosts` are (name, machine), in the order given; `order` names in the order planned. `chains`
    has the chains of each host's passage by its name. `gpus`, by machine name, are those used.
    """
    settings = settings or Settings(channels=2, **LOCAL)
    gpus = gpus or {}
    used = {one.name: gpus.get(one.name, one.gpu_indices) for _, one in hosts}
    cluster = cluster_of(
        [HostReport(host=name, machine=one, slots=len(used[one.name])) for name, one in hosts]
    )
    machines = dict(hosts)
    kinds, passages, planned, rank = {}, [], [], 0
    for name in order or [name for name, _ in hosts]:
        machine = machines[name]
        number = cluster.host_classes[name]
        key = number, tuple(chains[name])
        if key not in kinds:
            kinds[key] = len(passages)
            passages.append(
                path_of(number, machine, chains[name], settings, gpus=used[machine.name])
            )
        planned.append(PlannedHost(name=name, path=kinds[key], first_rank=rank))
        rank += len(used[machine.name])
    ranks = tuple(range(rank))
    own = {"settings": Settings(), "rings": (ranks,), "predicted_gbps": 5.0, "assumed": True}
    own = Choice(name="variables", **own)
    plan = Plan(
        cluster=cluster,
        class_gpus=tuple(tuple(used[one.machine.name]) for one in cluster.classes),
        hosts=tuple(planned),
        paths=tuple(passages),
        settings_verified=True,
        bound_gbps=12.5,
        proven=False,
        simulated=True,
        strategy="best-first",
        sets_measured=7,
        sets_remembered=3,
        sets_by_symmetry=2,
        choices={
            "default": msgspec.structs.replace(own, name="default", note="as it is"),
            "variables": own,
            "graph": Choice(name="graph", settings=settings, predicted_gbps=RATE, assumed=True),
        },
    )
    return check_plan(replace_plan(plan, **changes), where="plan")


def mixed(**changes):
    """Two rings over hosts of three classes, planned in another order than given."""
    hosts = [("gpu1", FOUR), ("gpu2", PAIR), ("gpu3", FOUR), ("login", ONE)]
    four = ((0, (1, 0, 2, 3), 1), (1, (3, 2, 0, 1), 0))
    chains = {
        "gpu1": four,
        "gpu2": ((1, (1, 0), 0), (0, (0, 1), 1)),
        "gpu3": four,
        "login": ((0, (0,), 0), (1, (0,), 1)),
    }
    order = changes.pop("order", ("gpu3", "gpu2", "gpu1", "login"))
    return cluster_plan(hosts, chains, order=order, **changes)


def equal_hosts(count, machine=FOUR, **changes):
    """A ring over so many hosts that are alike."""
    names = [f"gpu{number:04d}" for number in range(count)]
    chains = ((0, machine.gpu_indices, 0), (1, tuple(reversed(machine.gpu_indices)), 1))
    return cluster_plan(
        [(name, machine) for name in names], dict.fromkeys(names, chains), **changes
    )
