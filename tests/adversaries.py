"""Sources that break what bounds rest on: the described symmetry, or that flows slow each other."""

import random

from tccl_py.model.symmetry import mapping, relabel
from tccl_py.model.transfer import parse_flow
from tests.fakes import SharedResources

KINDS = ("pairs", "larger sets", "more is faster")


class Adversary(SharedResources):
    """Resources as symmetric as the machine; sets with certain parts are slower or faster.

    The parts are a few flows and some, but not all, of their images under the symmetry; by the kind
    "more is faster" all images are, and their sets are faster than their parts.
    """

    def __init__(self, seed, symmetry, *, gpus, per_switch):
        draw = random.Random(seed)
        capacities = {name: draw.choice((10.0, 20.0, 30.0)) for name in ("out", "in", "up", "down")}

        def uses(flow):
            one, other = flow.source.index, flow.destination.index
            used = [f"out {one}", f"in {other}"]
            if one // per_switch != other // per_switch:
                used += [f"up {one // per_switch}", f"down {other // per_switch}"]
            return used

        super().__init__(uses, lambda resource: capacities[resource.split()[0]])
        self.kind = draw.choice(KINDS)
        hops = [f"{a}:{b}" for a in range(gpus) for b in range(gpus) if a != b]
        size = 2 if self.kind == "pairs" else 3
        part = [parse_flow(hop) for hop in draw.sample(hops, size)]
        names = [mapping(symmetry, row) for row in symmetry.elements]
        images = {frozenset(relabel(flow, one) for flow in part) for one in names}
        images = sorted(images, key=lambda image: sorted(map(str, image)))
        if self.kind != "more is faster":
            images = draw.sample(images, draw.randint(1, max(1, len(images) - 1)))
        self.parts = images
        self.factor = draw.choice((1.25, 1.5) if self.kind == KINDS[2] else (0.3, 0.5, 0.75))

    def true_rate(self, transfers):
        hit = any(part <= set(transfers.flows) for part in self.parts)
        return super().true_rate(transfers) * (self.factor if hit else 1.0)
