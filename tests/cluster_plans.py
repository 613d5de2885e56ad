"""Plans of clusters, put together by hand from nodes that are small."""

import msgspec

from tccl_py.cluster_plan.checks import check_cluster_plan
from tccl_py.cluster_plan.plan import (
    ClusterPlan,
    ClusterStock,
    PlanChain,
    PlannedHost,
    PlanPassage,
)
from tccl_py.model.cluster import HostReport, cluster_of
from tccl_py.model.knowledge import Knowledge
from tccl_py.nccl.network import chain_hop_space, chains_as_rings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import view
from tests.nccl_nodes import with_nics
from tests.toy import toy_machine

NOTHING = Knowledge()
ONE = with_nics(toy_machine(gpus=1, name="one"), {0: "G0", 1: "G0"})
PAIR = with_nics(toy_machine(gpus=2, numa_nodes=2, name="pair"), {0: "G0", 1: "G1"})
FOUR = with_nics(toy_machine(gpus=4, numa_nodes=2, per_switch=2, name="four"), {0: "G0", 1: "G2"})
MACHINES = (ONE, PAIR, FOUR)
RATE = 10.0
LOCAL = {"net_disable_intra": True}
"""Or GPUs of two switches talk by their NICs, which is no hop of a chain."""


def passage(number, machine, chains, settings, *, gpus=None, rate=RATE):
    """A passage; chains are (entry NIC, GPUs, exit NIC), hop n of chain c has rate 20 + n + c."""
    space = chain_hop_space(view(machine, NOTHING, settings, gpus=gpus), chains_in_set=len(chains))
    made = []
    for place, (chain, found) in enumerate(
        zip(chains, chains_as_rings(space, chains), strict=True)
    ):
        flows = tuple(str(hop.flow) for hop in found.hops)
        made.append(
            PlanChain(
                entry_nic=chain[0],
                gpus=tuple(chain[1]),
                exit_nic=chain[2],
                flows=flows,
                gbps=tuple(20.0 + n + place for n in range(len(flows))),
            )
        )
    return PlanPassage(
        node_class=number, chains=tuple(made), rate_gbps=rate, type_intra="PHB", type_inter="PHB"
    )


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
                passage(number, machine, chains[name], settings, gpus=used[machine.name])
            )
        planned.append(PlannedHost(name=name, passage=kinds[key], first_rank=rank))
        rank += len(used[machine.name])
    plan = ClusterPlan(
        cluster=cluster,
        gpus=tuple(tuple(used[one.machine.name]) for one in cluster.classes),
        hosts=tuple(planned),
        passages=tuple(passages),
        settings=settings,
        settings_verified=True,
        rate_gbps=RATE,
        bound_gbps=12.5,
        proven=False,
        simulated=True,
        assumed=True,
        strategy="best-first",
        sets_measured=7,
        sets_remembered=3,
        sets_by_symmetry=2,
        stock=ClusterStock(
            rate_gbps=5.0, channels=(1,) * len(cluster.classes), assumed=True, note="as it is"
        ),
    )
    return check_cluster_plan(msgspec.structs.replace(plan, **changes), where="plan")


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
