"""The simulator: a BandwidthSource that answers from a machine model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from tccl_py.errors import MeasurementError, check_range, check_type
from tccl_py.files import encode_json
from tccl_py.model.measurement import JournalHeader, Measurement, Sets, listed_sets
from tccl_py.model.transfer import Flow, TransferSet
from tccl_py.simulator.model import (
    Capacity,
    Figures,
    Links,
    MachineModel,
    Memory,
    Parameters,
    bundled_parameters,
    figures_in,
    is_symmetric,
)
from tccl_py.simulator.routes import (
    Bound,
    Edge,
    Leg,
    Network,
    Role,
    applies,
    bent,
    congestion_bounds,
    figures_used,
    legs_of,
    matches,
    max_min_rates,
    roles,
    unbent,
)

MIB = 1024.0 * 1024.0


class Load(NamedTuple):
    """A leg's traffic over a place of a capacity."""

    capacity: int
    place: str
    writes: bool


class Work(NamedTuple):
    """An executor's part in a flow: the limit, the GPU, and the rate alone, GB/s."""

    limit: int
    gpu: str
    writes: bool
    unbent: float


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a flow, independent of all other flows; computed once a flow."""

    loads: tuple[Load, ...]
    roles: tuple[Role, ...]
    legs: tuple[Leg, ...]
    buffer: str
    buffer_mib: float
    limits: tuple[int, ...]
    work: tuple[Work, ...] = ()
    cap: float = math.inf
    cap_assumed: bool = False


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of a set's flows in GB/s, and whether an assumed value lies behind them."""

    gbps: tuple[float, ...]
    assumed: bool


class Engine:
    """A model made ready to answer sets: routes found once, figures resolved once."""

    def __init__(self, model: MachineModel, parameters: Parameters) -> None:
        self.model = model
        self.network = Network(model)
        self._uses: dict[Flow, Use] = {}
        self.resolve(parameters)

    def resolve(self, parameters: Parameters) -> None:
        """Use these parameters' values from now on; routes are kept."""
        self.figures = Figures(parameters)
        self._uses = {flow: self._cap(flow, use) for flow, use in self._uses.items()}
        self._values = [
            {name: (self.figures.value(x), self.figures.is_assumed(x)) for name, x in given.items()}
            for given in map(figures_in, self.model.capacities)
        ]

    def rates(self, transfers: TransferSet) -> Rates:
        """Return the rates of the set's flows, in order; errors as `legs_of`, or no figure."""
        uses = [self.use(flow) for flow in transfers.flows]
        caps: list[Bound] = [{i: 1 / use.cap} for i, use in enumerate(uses) if use.cap < math.inf]
        flows = [use.roles for use in uses]
        congested = list(congestion_bounds(self.model.congestion, flows, self.figures))
        places, assumed = self._capacity_bounds(uses)
        bounds = caps + self._executor_bounds(uses)
        bounds += [bound for flow_bounds, _ in congested for bound in flow_bounds]
        gbps = max_min_rates(len(uses), bounds + places)
        for flow, rate in zip(transfers.flows, gbps, strict=True):
            if rate == math.inf:
                raise MeasurementError(f"{flow}: {self.model.name} has no figure on its route")
        assumed |= any(flow_bounds for _, flow_bounds in congested) or any(
            use.cap_assumed for use in uses
        )
        return Rates(gbps=tuple(gbps), assumed=assumed)

    def use(self, flow: Flow) -> Use:
        """Return the resources of a flow; found once and kept."""
        use = self._uses.get(flow)
        if use is None:
            use = self._uses[flow] = self._cap(flow, self._use(flow))
        return use

    def _cap(self, flow: Flow, use: Use) -> Use:
        limits = [(number, self.model.executors[number]) for number in use.limits]
        figures = [figure for _, x in limits for figure in figures_used(x, flow)]
        alone = {number: unbent(x, self.figures, flow) for number, x in limits}
        return msgspec.structs.replace(
            use,
            work=tuple(
                Work(number, leg.keys["executor_gpu"], leg.operation == "write", alone[number])
                for number, _ in limits
                for leg in use.legs
                if leg.executor != "nic"
            ),
            cap=min((bent(x, self.figures, alone[n]) for n, x in limits), default=math.inf),
            cap_assumed=any(self.figures.is_assumed(figure) for figure in figures),
        )

    def _executor_bounds(self, uses: list[Use]) -> list[Bound]:
        """Bound each GPU's blocks together, over several flows, each direction apart."""
        groups: dict[tuple[int, str, bool], dict[int, float]] = {}
        for flow, use in enumerate(uses):
            for limit, gpu, writes, alone in use.work:
                groups.setdefault((limit, gpu, writes), {})[flow] = alone
        bounds: list[Bound] = []
        for (limit, _, _), together in groups.items():
            # Flows of few blocks beside flows of more are still bound by their own sum: else
            # another flow of many blocks would take the bend below the ceiling from them.
            for most in sorted(set(together.values())):
                few = {flow: alone for flow, alone in together.items() if alone <= most}
                total = bent(self.model.executors[limit], self.figures, sum(few.values()))
                if len(few) > 1 and total < math.inf:
                    bounds.append(dict.fromkeys(few, 1 / total))
        return bounds

    def _use(self, flow: Flow) -> Use:
        legs = legs_of(self.network, flow)
        cache = self.model.fifo_cache
        blocks = flow.blocks or (cache.default_blocks if cache is not None else 1)
        mib = blocks * flow.fifo.bytes if flow.fifo is not None else 0.0
        mib = flow.buffer if flow.buffer is not None else mib
        # The NUMA node of a FIFO or small buffer, "" if in no node's memory.
        held = cache is not None and (flow.is_bounce or flow.is_network or flow.buffer)
        nodes = [leg.keys["memory"] for leg in legs if "memory" in leg.keys] if held else []
        return Use(
            loads=tuple(
                Load(number, place, leg.operation == "write")
                for leg in legs
                for number, capacity in enumerate(self.model.capacities)
                if matches(capacity.counts, leg)
                for place in _places(capacity, leg, self.network)
            ),
            roles=tuple(
                role
                for number, leg in enumerate(legs)
                for role in roles(self.model.congestion, number, leg)
            ),
            legs=legs,
            buffer=nodes[0] if nodes else "",
            buffer_mib=mib / MIB,
            limits=tuple(
                number
                for number, limit in enumerate(self.model.executors)
                if applies(limit, self.network, flow, legs)
            ),
        )

    def _capacity_bounds(self, uses: list[Use]) -> tuple[list[Bound], bool]:
        """Return the bounds of the capacities that the set loads, and whether any is assumed."""
        (cached, assumed), cache = self._cached_shares(uses), self.model.fifo_cache
        places: dict[tuple[int, str], tuple[Bound, Bound]] = {}
        for flow, use in enumerate(uses):
            for capacity, place, writes in use.loads:
                reading, writing = places.setdefault((capacity, place), ({}, {}))
                side = writing if writes else reading
                side[flow] = side.get(flow, 0.0) + 1.0
        bounds = []
        for (capacity, place), (reading, writing) in places.items():
            values = self._values[capacity]
            share = cached.get(place, 0.0) if reading and writing else 0.0
            for bound, field in _sides(reading, writing, values):
                value, is_assumed = values[field]
                assumed = assumed or is_assumed
                shares = {flow: count / value for flow, count in bound.items()}
                if share and cache is not None:
                    figure = cache.write if field.startswith("write") else cache.read
                    # Where the cache carried less than the memory, the memory would be used.
                    inside = max(self.figures.value(figure), value)
                    cost = share / inside + (1.0 - share) / value
                    fifos = [flow for flow in bound if uses[flow].buffer == place]
                    shares.update((flow, bound[flow] * cost) for flow in fifos)
                bounds.append(shares)
        return bounds, assumed

    def _cached_shares(self, uses: list[Use]) -> tuple[dict[str, float], bool]:
        """Return, by NUMA node, the cached share of the bounces' traffic."""
        cache = self.model.fifo_cache
        # A FIFO is written and read. So is the buffer of a plain write and a plain read.
        sides: dict[str, dict[str, float]] = {}
        for use in uses:
            for operation in {leg.operation for leg in use.legs} if use.buffer else ():
                side = sides.setdefault(use.buffer, {})
                side[operation] = side.get(operation, 0.0) + use.buffer_mib
        footprints = {place: max(side.values()) for place, side in sides.items()}
        if cache is None or not footprints:
            return {}, False
        size = self.figures.value(cache.cache_mib)
        used = (cache.cache_mib, cache.write, cache.read)
        shares = {place: min(1.0, size / mib) for place, mib in footprints.items()}
        return shares, any(self.figures.is_assumed(figure) for figure in used)


def _sides(
    reading: Bound, writing: Bound, values: dict[str, tuple[float, bool]]
) -> list[tuple[Bound, str]]:
    """Return the bounds of one place: each operation's sum, and in a mix the sum of both."""
    fields = {"write": writing, "read": reading}
    if reading and writing:
        total = dict(reading)
        for flow, count in writing.items():
            total[flow] = total.get(flow, 0.0) + count
        fields |= {"write_in_mix": writing, "read_in_mix": reading, "mixed": total}
    return [(bound, field) for field, bound in fields.items() if bound and field in values]


def _places(capacity: Capacity, leg: Leg, network: Network) -> list[str]:
    """Return the places of a capacity on a leg's route, once for each pass."""
    at = capacity.at
    if isinstance(at, Memory):
        place = leg.keys.get("memory")
        return [place] if place else []
    edges = (edge for edge in leg.edges if _select(at, edge, network))
    if at.together:
        return ["" if at.way == "both" else str(_leaves(edge, network)) for edge in edges]
    return [">".join(sorted(edge) if at.way == "both" else edge) for edge in edges]


def _leaves(edge: Edge, network: Network) -> bool:
    """Return whether a link is passed from its inner end, the device below or the GPU."""
    parents, (near, far) = network.machine.parents, edge
    return parents.get(near) == far or (near[0] == "G" and parents.get(far) != near)


def _select(links: Links, edge: Edge, network: Network) -> bool:
    kind = network.kinds[edge]
    if kind not in links.kinds:
        return False
    leaves = _leaves(edge, network)
    inner = edge[0] if leaves else edge[1]
    named = (inner,) if kind == "pci" else edge
    at_root = kind == "pci" and network.machine.parents[inner] in network.roots
    span = "socket" if network.between_sockets(edge) else "numa"
    return (
        (not links.devices or bool(set(named) & set(links.devices)))
        and (links.between is None or set(links.between) == set(edge))
        and (links.way in ("each", "both") or (links.way == "out") == leaves)
        and (links.position == "any" or at_root)
        and (links.span in ("any", span) or kind != "smp")
    )


_NOISY_SAMPLES = 9  # Of each flow in a noisy measurement; one suffices without noise


class Simulator:
    """A source of measurements simulated by `model`.

    Args:
        model: the machine and the capacities of its parts.
        noise: standard deviation of a sample in log terms, 0.05 being about 5 %.
        seed: gives the n-th measurement of a set the same samples, whatever was measured before.
    """

    simulated = True

    def __init__(self, model: MachineModel, *, noise: float = 0.0, seed: int = 0) -> None:
        check_type(model, "model", MachineModel)
        check_type(noise, "noise", int, float)
        check_type(seed, "seed", int)
        check_range("`noise`", noise, 0, 1)
        check_range("`seed`", seed, 0, math.inf)
        self.model = model
        self.noise = noise
        self.seed = seed
        self._asked: dict[TransferSet, int] = {}
        self._before: Callable[[TransferSet], int] = lambda _: 0
        self._engine = Engine(model, bundled_parameters())

    @cached_property
    def bounds_hold(self) -> bool:
        """Whether rates by parts and by images hold: for images capacities must be symmetric."""
        return is_symmetric(self.model)

    @cached_property
    def header(self) -> JournalHeader:
        """The header of journals: the model and its parameters, at this noise."""
        content = encode_json(self.model) + encode_json(bundled_parameters())
        digest = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        return JournalHeader(
            machine=self.model.name,
            identity=f"model {digest}",
            simulated=True,
            noise=self.noise,
            seed=self.seed if self.noise else 0,
        )

    def resume(self, times: Callable[[TransferSet], int]) -> None:
        """Continue an earlier run, in which each set was measured `times(set)` times."""
        self._before = times

    def check(self, sets: Sets) -> None:
        """Refuse sets that the machine cannot run; errors as `legs_of`."""
        for transfers in listed_sets(sets):
            for flow in transfers.flows:
                self._engine.use(flow)

    def measure(self, sets: Sets) -> Sequence[Measurement]:
        """Answer each set (or flow, or text), in the order given; errors as `Engine.rates`."""
        answers = []
        for transfers in listed_sets(sets):
            rates = self._engine.rates(transfers)
            measurement = Measurement(
                transfers=transfers,
                samples_gbps=self._samples(transfers, rates.gbps),
                simulated=True,
                assumed=rates.assumed,
                source=f"simulator:{self.model.name}",
            )
            answers.append(measurement)
        return answers

    def _samples(
        self, transfers: TransferSet, gbps: tuple[float, ...]
    ) -> tuple[tuple[float, ...], ...]:
        if not self.noise:
            return tuple((rate,) for rate in gbps)
        if transfers not in self._asked:
            self._asked[transfers] = self._before(transfers)
        self._asked[transfers] += 1
        key = f"{self.seed} {self._asked[transfers]} {transfers}"
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        generator = np.random.default_rng(int.from_bytes(digest, "big"))
        factors = np.exp(generator.normal(0.0, self.noise, (len(gbps), _NOISY_SAMPLES)))
        return tuple(
            tuple(float(rate * factor) for factor in row)
            for rate, row in zip(gbps, factors, strict=True)
        )
