"""Machines that drift, or only seem to: plans to check, noise, and links that became slower."""

import functools

import msgspec
import numpy as np

from tccl_py.health.drift.check import Effort, find_drift
from tccl_py.health.drift.choice import chosen_sets
from tccl_py.measurements.memory import RememberingSource
from tccl_py.plan.planner import make_plan
from tccl_py.search.problem import Budget
from tccl_py.simulator.library import load_bundled
from tccl_py.simulator.model import Links
from tccl_py.simulator.source import Simulator
from tccl_py.transfers.transfer import parse_set

FIGURES = ("write", "read", "mixed", "write_in_mix", "read_in_mix")


class Journalled:
    """A plan of a bundled machine and the sets that its journal has, to draw noise for anew."""

    def __init__(self, name, noise):
        self.model = load_bundled(name)
        source = RememberingSource(Simulator(self.model, noise=noise, seed=1))
        budget = Budget(sets=60, idle_sets=15)
        model = self.model
        self.plan = make_plan(model.machine, model.knowledge, source, budget=budget)
        self.times = source.times_known

    @functools.cached_property
    def some(self):
        """The sets that a check would choose, and some of the rest."""
        counted = {text: [None] * times for text, times in self.times.items()}
        chosen = map(str, chosen_sets(self.plan, counted, most=24, seed=0))
        return {text: parse_set(text) for text in (*chosen, *list(self.times)[::10])}

    def journal(self, source):
        """A journal of some of its sets by another source, as often as they were measured."""
        return {
            text: [source.measure([one])[0] for _ in range(self.times[text])]
            for text, one in self.some.items()
        }


@functools.cache
def journalled(name, noise=0.02):
    """Planned once, whoever asks."""
    return Journalled(name, noise)


class Wandering:
    """A source whose measurements wander as wholes, by so much of their log rates."""

    simulated = True

    def __init__(self, source, between, seed):
        self.source, self.between = source, between
        self.random = np.random.default_rng(seed)

    def measure(self, sets):
        answers = []
        for one in self.source.measure(sets):
            factor = float(np.exp(self.random.normal(0.0, self.between)))
            rows = tuple(tuple(rate * factor for rate in row) for row in one.samples_gbps)
            answers.append(msgspec.structs.replace(one, samples_gbps=rows))
        return answers


def with_slower_link(model, device, left, *, kinds=("pci", "nvlink")):
    """The model with the links above one device at `left` of what they carry."""
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
    """One check of a machine whose journal and whose present have noise of their own."""

    def source(model, seed):
        simulator = Simulator(model, noise=noise, seed=seed)
        return Wandering(simulator, between, seed) if between else simulator

    journal = case.journal(source(case.model, 2 * seed))
    present = source(now or case.model, 2 * seed + 1)
    return find_drift(case.plan, journal, present, effort=effort or Effort(seed=seed))
