"""Machines that drift, or only seem to: plans to check, noise, and links that became slower."""

import functools

import msgspec
import numpy as np

from tccl_py.health.drift import Effort, chosen_sets, find_drift
from tccl_py.planning.planner import make_plan
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.model import Links
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench

FIGURES = ("write", "read", "mixed", "write_in_mix", "read_in_mix")


class Journalled:
    """A plan of a bundled machine and the sets that its journal has, to draw noise for anew."""

    def __init__(self, name, noise):
        self.model = load_bundled(name)
        source = Bench(Simulator(self.model, noise=noise, seed=1))
        budget = Budget(sets=60, idle_sets=15)
        model = self.model
        self.plan = make_plan(model.machine, model.knowledge, source, budget=budget)
        self.times = {key: len(source.recall(key)) for key in source.sets}
        self.exact = exact_rates(model)

    @functools.cached_property
    def some(self):
        """The sets that a check would choose, and some of the rest."""
        counted = {text: [None] * times for text, times in self.times.items()}
        chosen = chosen_sets(self.plan, counted, most=24, seed=0)
        return tuple(dict.fromkeys((*chosen, *list(self.times)[::10])))

    def journal(self, source):
        """A journal of some of its sets by another source, as often as they were measured."""
        return {
            one: [source.measure([one])[0] for _ in range(self.times[one])] for one in self.some
        }


@functools.cache
def journalled(name, noise=0.02):
    """Planned once, whoever asks."""
    return Journalled(name, noise)


class Noisy:
    """A model's rates with noise as the simulator's, drawn faster.

    `noise` is the spread of samples, `between` that of whole measurements beside it.
    """

    simulated = True
    repeats = 9

    def __init__(self, exact, *, noise, between=0.0, seed=0):
        self.exact, self.noise, self.between = exact, noise, between
        self.random = np.random.default_rng(seed)

    def measure(self, sets):
        return [self._measure(one) for one in sets]

    def _measure(self, one):
        found = self.exact(one)
        shape = (len(found.samples_gbps), self.repeats)
        factors = np.exp(self.random.normal(self.random.normal(0, self.between), self.noise, shape))
        rows = factors * np.array(found.samples_gbps)
        return msgspec.structs.replace(found, samples_gbps=tuple(map(tuple, rows.tolist())))


def exact_rates(model):
    """A function from sets to measurements without noise; each set is simulated once."""
    simulator = Simulator(model)

    @functools.cache
    def exact(one):
        return simulator.measure([one])[0]

    return exact


def with_slower_link(model, device, left, *, kinds=()):
    """The model with one device's links at `left` of what they carry.

    Those of these kinds; NVLinks, or PCI where there are none, if none are given.
    """
    found = {kind for one in model.capacities if isinstance(one.at, Links) for kind in one.at.kinds}
    kinds = kinds or (("nvlink",) if "nvlink" in found else ("pci",))
    slower = []
    for capacity in model.capacities:
        at = capacity.at
        if not isinstance(at, Links) or not set(kinds) & set(at.kinds):
            continue
        nvlink = "nvlink" in at.kinds
        if at.devices and device not in at.devices:
            continue
        place = {"between": (device, "S0")} if nvlink else {"devices": (device,)}
        figures = {
            name: msgspec.structs.replace(figure, scale=figure.scale * left)
            for name in FIGURES
            if (figure := getattr(capacity, name)) is not None
        }
        slower.append(
            msgspec.structs.replace(
                capacity,
                name=f"{capacity.name}, slower above {device}",
                at=msgspec.structs.replace(at, **place),
                **figures,
            )
        )
    assert slower
    return msgspec.structs.replace(model, capacities=(*model.capacities, *slower))


def checked(case, *, noise, seed, between=0.0, now=None, effort=None):
    """One check of a machine whose journal and whose present have noise of their own.

    `now` gives the present's rates, as `exact_rates` makes them; None is an unchanged machine.
    """
    how = {"noise": noise, "between": between}
    journal = case.journal(Noisy(case.exact, seed=2 * seed, **how))
    present = Noisy(now or case.exact, seed=2 * seed + 1, **how)
    return find_drift(case.plan, journal, present, effort=effort or Effort(seed=seed))
