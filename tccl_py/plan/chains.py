"""Parts of plans: chains of hops on hosts, ways to run NCCL, and rings for smaller sets of GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import gcd
from typing import Annotated, Literal, TypeVar, get_args

import msgspec

from tccl_py.model.links import LinkFact, LinkVerdict, joined_clauses
from tccl_py.model.machine import Machine
from tccl_py.model.rings import Hop, Ring, join_flows, on_host, receiving_nic, sending_nic
from tccl_py.model.transfer import Flow
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.system import PathType
from tccl_py.nccl.tuner import SizeChoice

AS_GOOD = 0.01
"""A choice this much slower than the best (relative) is as good."""
PROOF = 0.0101
"""A plan counts as best if its bound is no farther above it (relative).

It is the tolerance of a search, and a little for rounding.
"""
CUT_SHORT = (
    "the limit of sets or seconds was reached: with more of them rings may be faster, and known "
    "for more sets of GPUs"
)
"""The notice of a plan whose search ended early."""
WORLD = -1
"""The source of the hop by which a chain enters a host, and the target of the one that leaves."""
Order = tuple[int, ...]
"""The GPUs of a ring: indices on a single host, ranks over several."""
Orders = Iterable[int] | Iterable[Iterable[int]]
"""One ring or several, each as an order of its GPUs."""
Item = TypeVar("Item", bound=Hashable)
Rate = Annotated[float, msgspec.Meta(gt=0, lt=1e6)]
"""A bandwidth, GB/s."""
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Gpu = Annotated[int, msgspec.Meta(ge=WORLD, lt=1 << 24)]
"""An index, a rank, or WORLD."""
PathName = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(PathType.__members__)})?$")]


class PlanHop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hop of a ring: its flow, and the bandwidth with all other flows running, GB/s."""

    source: Gpu
    target: Gpu
    flow: Flow
    rate_gbps: Rate = msgspec.field(name="gbps")

    @property
    def ends(self) -> tuple[int, int]:
        """The GPU before the hop and the GPU after it, or WORLD."""
        return self.source, self.target


class PlanChain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ring's hops on a host, closed from the lowest GPU on, or open from NIC to NIC.

    NICs are indices, None in a closed ring. The first hop of an open chain enters the host, from
    WORLD; the last hop leaves it, to WORLD.
    """

    hops: tuple[PlanHop, ...]
    entry_nic: Number | None = None
    exit_nic: Number | None = None

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPU indices in ring order."""
        return tuple(hop.source for hop in self.hops if hop.source != WORLD)

    @property
    def ring(self) -> Ring:
        """The hops without rates; a chain closes through WORLD."""
        return Ring(tuple(Hop(*hop.ends, hop.flow) for hop in self.hops))

    @property
    def bottleneck(self) -> PlanHop:
        """The slowest hop."""
        return min(self.hops, key=lambda hop: slowest_first(hop.rate_gbps, hop.flow))

    @property
    def rate_gbps(self) -> float:
        """The bandwidth of this ring beside the others, GB/s: that of its slowest hop."""
        return min(hop.rate_gbps for hop in self.hops)


def slowest_first(gbps: float, flow: Flow) -> tuple[float, Flow]:
    """Return the key by which flows are sorted; rates that show as one are equal."""
    return float(f"{gbps:.4g}"), flow


class HostPath(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All rings on a host of one class, a chain for each; equal hosts share paths."""

    node_class: Number
    chains: tuple[PlanChain, ...]
    type_intra: PathName
    """The farthest NCCL path inside the host, as NCCL's tuner reads it."""
    type_inter: PathName = ""
    """The farthest to its NICs; "" on a single host."""

    @property
    def rate_gbps(self) -> float:
        """The bandwidth of all rings together on this host, GB/s."""
        return len(self.chains) * min(chain.rate_gbps for chain in self.chains)


class PlannedHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host in ring order: the number of its path, and the first of its ranks."""

    name: str
    path: Number
    first_rank: Number


ChoiceName = Literal["default", "large-buffers", "variables", "graph"]
CHOICES: tuple[ChoiceName, ...] = get_args(ChoiceName)
"""Ways to run NCCL, the smallest intervention first: large buffers change less than variables."""
_MOST_REASONS = 3
BY_VARIABLES: tuple[ChoiceName, ...] = ("large-buffers", "variables")
"""Those that are variables alone."""


class FailingPair(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"source": "from", "target": "to"},
):
    """Two ends between which NCCL would send data that does not arrive."""

    source: int | str
    """The sending GPU by index, or host and NIC as "node3 mlx5_0"."""
    target: int | str


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a choice does not run."""

    verdict: str
    """What its jobs do, in words: "cannot connect", or a verdict on links, as "hangs"."""
    pairs: tuple[FailingPair, ...] = ()
    """The first pairs that fail, at most MOST_FAILING."""


MOST_FAILING = 16
"""Pairs that a Failure lists."""


def failure_over(facts: Sequence[LinkFact], host: str = "") -> Failure | None:
    """Return how NCCL fails that uses these links of a host; None if none of them is broken."""
    broken = [fact for fact in facts if fact.state == "broken"]

    def name(gpu: int) -> int | str:
        return f"{host} GPU {gpu}" if host else gpu

    pairs = tuple(FailingPair(name(f.one), name(f.other)) for f in broken[:MOST_FAILING])
    # In the order of LinkVerdict, the worst first.
    verdicts = sorted((fact.verdict for fact in broken), key=get_args(LinkVerdict).index)
    return Failure(verdict=verdicts[0], pairs=pairs) if broken else None


def why_unsound(facts: Sequence[LinkFact]) -> str:
    """Return why links may not be used, in a clause: of broken ones if there are any.

    >>> why_unsound([LinkFact(one=0, other=1, state="not proven")])
    'P2P between GPUs 0 and 1 is not proven'
    """
    state = min((fact.state for fact in facts), default="")
    worst = [fact for fact in facts if fact.state == state]
    reasons = [f.what or f"P2P between GPUs {f.one} and {f.other} is {state}" for f in worst]
    shown = joined_clauses(reasons)
    return "; ".join([*shown[:_MOST_REASONS], *["..."] * (len(shown) > _MOST_REASONS)])


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way to run NCCL over the plan's GPUs."""

    name: ChoiceName
    settings: Settings
    rings: tuple[tuple[Gpu, ...], ...] | None = None
    """An order of GPUs for each channel; None is not known.

    GPUs are indices on a single host. Over several hosts they are ranks, in the order of hosts
    given for default NCCL and variables, in the planned one for graph files.
    """
    predicted_gbps: Rate | None = None
    """The predicted bus bandwidth of a collective; None where no source can rate it."""
    error: float = 0.0
    """Half the 95 % interval of the predicted bandwidth, relative."""
    achieved_gbps: Rate | None = None
    """The bus bandwidth of real collectives; None until jobs ran."""
    assumed: bool = False
    """Whether assumed values lie behind the prediction."""
    note: str = ""
    """What is special about the choice."""
    fails: Failure | None = None
    """Why the choice does not run, if so: then it is not recommended."""

    @property
    def rate_gbps(self) -> float | None:
        """The predicted bandwidth, which no job has of a choice that fails: None."""
        return None if self.fails else self.predicted_gbps

    @property
    def best_known_gbps(self) -> float | None:
        """The achieved bandwidth, or the predicted one where none is known."""
        return self.rate_gbps if self.achieved_gbps is None else self.achieved_gbps

    @property
    def environment(self) -> dict[str, str]:
        """NCCL's variables; a graph file's place is in env.sh of a plan's files."""
        return environment(self.settings)


class SizeAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The installed NCCL's choices by message size, under settings."""

    settings: Settings
    rows: tuple[SizeChoice, ...]


class SubsetRings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rings for a communicator over some of the GPUs, under the plan's settings."""

    gpus: tuple[Gpu, ...]
    rings: tuple[tuple[Gpu, ...], ...]
    """Without any the rate is that of NCCL's own rings under the plan's variables."""
    rate_gbps: Rate
    nodes: tuple[Number, ...] = ()
    """The NUMA node of each GPU's bounce buffers; () leaves them where NCCL puts them."""
    gains: bool = True
    """Whether they are faster than NCCL's own, or variables that single communicators get than
    default NCCL: else the plugin gives communicators over these GPUs nothing."""


def plan_chain(hops: Sequence[Hop], rates: Sequence[float]) -> PlanChain:
    """Return a ring, or a chain between NICs, of hops with these rates."""
    planned = tuple(
        PlanHop(source=hop.source, target=hop.target, flow=hop.flow, rate_gbps=rate)
        for hop, rate in zip(hops, rates, strict=True)
    )
    into, out = receiving_nic(hops[0].flow), sending_nic(hops[-1].flow)
    return PlanChain(hops=planned, entry_nic=into, exit_nic=out)


def as_good(rates: dict[ChoiceName, tuple[float, float]]) -> ChoiceName:
    """Return the first choice within AS_GOOD of the best, or within its error if that is wider.

    >>> as_good({"default": (99.5, 0.0), "variables": (100.0, 0.0), "graph": (100.0, 0.0)})
    'default'
    """
    best = max(rate for rate, _ in rates.values())
    return next(
        name for name, (rate, error) in rates.items() if rate * (1 + max(AS_GOOD, error)) >= best
    )


def prefer(rate: float, than: float, *, less: bool) -> bool:
    """Return whether a rate is clearly higher, or as high with fewer rings or channels (`less`)."""
    return rate > than * (1 + AS_GOOD) or (less and rate >= than * (1 - AS_GOOD / 2))


def is_at_bound(rate_gbps: float, bound_gbps: float | None) -> bool:
    """Return whether a bound shows that no rings are clearly faster; None shows nothing."""
    return bound_gbps is not None and bound_gbps <= rate_gbps * (1 + PROOF)


def sender_nodes(machine: Machine, rings: Iterable[Ring | PlanChain]) -> tuple[int, ...]:
    """Return the NUMA node through which each GPU's bounces go, by GPU; its own without a bounce.

    >>> from tccl_py.model.rings import Hop, Ring
    >>> from tccl_py.model.rings import bounce
    >>> from tccl_py.simulator.descriptions import load_bundled
    >>> ring = Ring((Hop(0, 1, bounce(0, 1, 2)), Hop(1, 0, bounce(1, 0, 0))))
    >>> sender_nodes(load_bundled("amd-3090").machine, [ring])
    (2, 0)
    """
    nodes: dict[int, int] = {}
    for hop in (hop for ring in rings for hop in ring.hops):
        through = hop.flow.through
        if through is not None or hop.source not in nodes:
            near = machine.numa_of(f"G{hop.source}")
            nodes[hop.source] = near if through is None else through
    return tuple(node for _, node in sorted(nodes.items()))


def condense(orders: Sequence[Item]) -> tuple[Item, ...]:
    """Return the shortest list of rings with the same shares: equal channels are one ring.

    >>> condense([(0, 1), (1, 0), (0, 1), (1, 0)])
    ((0, 1), (1, 0))
    """
    counts = Counter(orders)
    share = gcd(*counts.values())
    return tuple(order for order, count in counts.items() for _ in range(count // share))


def per_channel(rings: Iterable[tuple[int, ...]], channels: int) -> tuple[tuple[int, ...], ...]:
    """Deal rings out to channels in turn.

    >>> per_channel([(0, 1), (1, 0)], 4)
    ((0, 1), (1, 0), (0, 1), (1, 0))
    """
    orders = list(rings)
    return tuple(orders[channel % len(orders)] for channel in range(channels))


def ring_over_hosts(parts: Sequence[tuple[str, Mapping[int, int], PlanChain]]) -> PlanChain:
    """Return a ring of chains, each with its host and the numbers of the host's GPUs.

    A hop between hosts is as fast as the slower of its ends. A chain that closes stays one.
    """
    hops: list[PlanHop] = []
    for (host, numbers, chain), (receiver, receiving, following) in pairwise((*parts, parts[0])):
        for hop in chain.hops:
            if WORLD not in hop.ends:
                source, target = (numbers[gpu] for gpu in hop.ends)
                flow = on_host(hop.flow, host)
                hops.append(msgspec.structs.replace(hop, source=source, target=target, flow=flow))
        out, into = chain.hops[-1], following.hops[0]
        if WORLD not in out.ends:
            continue
        crossing = PlanHop(
            source=numbers[out.source],
            target=receiving[into.target],
            flow=join_flows(out.flow, into.flow, sender=host, receiver=receiver),
            rate_gbps=min(out.rate_gbps, into.rate_gbps),
        )
        hops.append(crossing)
    return PlanChain(hops=tuple(hops))
