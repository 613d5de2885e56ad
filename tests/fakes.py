"""Bandwidth sources and hop spaces that stand for hardware in tests of the search."""

import functools

import numpy as np

from tccl_py.measurements.measurement import Measurement
from tccl_py.transfers.hops import Hop, HopSpace
from tccl_py.transfers.transfer import bounce, direct_read, direct_write


def space_of(gpus, *, mechanisms=1, missing=()):
    """Every ordered pair but `missing`; mechanisms are write, read, bounce by C0."""
    makers = (direct_write, direct_read, lambda i, j: bounce(i, j, 0))[:mechanisms]
    hops = {
        (i, j): tuple(Hop(i, j, make(i, j)) for make in makers)
        for i in gpus
        for j in gpus
        if i != j and (i, j) not in missing
    }
    return HopSpace(name="test", gpus=tuple(gpus), hops=hops)


class SharedResources:
    """Each flow uses some resources; a resource's capacity is shared equally by its flows.

    The slowest share is every flow's rate, so adding flows never helps. `alone` overrides what a
    flow gets at most, by its text. Keeps every set it was asked for in `calls`.
    """

    simulated = True

    def __init__(self, uses, capacity, *, alone=None, noise=0.0, seed=0):
        self.uses, self.capacity, self.alone = uses, capacity, alone or {}
        self.noise, self.random = noise, np.random.default_rng(seed)
        self.calls = []

    def true_rate(self, transfers):
        load = {}
        for flow in transfers.flows:
            for resource in self.uses(flow):
                load[resource] = load.get(resource, 0) + 1
        rates = [self.capacity(resource) / count for resource, count in load.items()]
        rates += [self.alone[str(flow)] for flow in transfers.flows if str(flow) in self.alone]
        return min(rates)

    def measure(self, sets):
        answers = []
        for transfers in sets:
            self.calls.append(str(transfers))
            rate = self.true_rate(transfers)
            if self.noise:
                rate *= 1 + self.noise * self.random.standard_normal()
            answers.append(
                Measurement(
                    transfers=str(transfers),
                    samples_gbps=tuple((rate,) for _ in transfers.flows),
                    simulated=True,
                )
            )
        return answers


def random_resources(seed, *, resources=6, noise=0.0):
    """A source whose flows use a few of some shared resources, and one of their own."""

    def own_random(key):
        return np.random.default_rng((seed, *key.encode()))

    @functools.cache
    def uses_of(key):
        random = own_random(key)
        count = int(random.integers(1, 4))
        return [f"own:{key}", *random.choice(resources, size=count, replace=False).tolist()]

    @functools.cache
    def capacity(resource):
        low, high = (10, 50) if isinstance(resource, str) else (5, 60)
        return float(own_random(str(resource)).integers(low, high))

    return SharedResources(lambda flow: uses_of(str(flow)), capacity, noise=noise, seed=seed)


def two_uplinks(*, uplink=10.0, port=30.0, **more):
    """Four GPUs, 0 1 and 2 3 below one switch each; hops between switches share uplinks."""

    def uses(flow):
        one, other = flow.source.index, flow.destination.index
        used = [f"out{one}", f"in{other}"]
        if one // 2 != other // 2:
            used += [f"up{one // 2}", f"down{other // 2}"]
        return used

    return SharedResources(
        uses, lambda resource: uplink if resource[:2] in ("up", "do") else port, **more
    )
