"""A topology file for NCCL's own search: which description of a machine serves it best.

A graph file holds for one set of GPUs; a topology file (NCCL_TOPO_FILE) for every communicator.
Descriptions are tried on our emulation of NCCL's search, and what it then chooses is judged by the
source that the plan's own rates come from. One is taken only if no set of GPUs loses by it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations, permutations

import msgspec

from tccl_py.errors import MeasurementError, SearchError
from tccl_py.model.machine import Machine
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.paths import PathType
from tccl_py.model.symmetry import automorphisms
from tccl_py.model.transfer import transfer_set
from tccl_py.nccl.paths import local_nets
from tccl_py.nccl.transport import View, hop_space, view
from tccl_py.nccl.versions import version_facts
from tccl_py.plan.beliefs import Belief, beliefs
from tccl_py.plan.plan import Plan, TopologyFile
from tccl_py.plan.stock_judge import OutOfSetsError, StockJudge, Worth
from tccl_py.sources.memory import RememberingSource

Subset = tuple[int, ...]

ALL_SETS_UP_TO = 8
"""On machines with more GPUs there are too many sets of them: some are drawn, and it is said so."""
SETS_DRAWN = 60
SETS_TO_SIEVE = 16
MOST_TRIED = 2
"""Descriptions that are checked on every set of GPUs before none is written."""
MOST_MEASURED = 150
"""Sets that hardware is asked for at most; where they do not suffice there is no file."""
SAME_SIMULATED, SAME_MEASURED = 0.002, 0.03
"""Rates that differ by less (relative) are the same: measured ones spread."""
WORTH = 0.01
"""A file must promise this much more over all sets (relative), or end a fallback."""
Pair = tuple[int, int]
_CHECKED_VERSIONS = ("2.28", "2.30")


class _RefusedError(Exception):
    """There is no file; the text says why."""


def calibrated(plan: Plan, source: BandwidthSource) -> Plan:
    """The plan with a topology file if one is found that helps, and a notice that says which.

    Cost: NCCL's search is emulated for some hundreds of sets of GPUs, which takes seconds to a
    minute; hardware measures at most MOST_MEASURED sets. KeyboardInterrupt gives the plan marked
    as interrupted.

    Args:
        plan: complete, with its settings.
        source: answers transfer sets of the plan's machine.
    """
    remembering = source if isinstance(source, RememberingSource) else RememberingSource(source)
    measured, remembered = remembering.sets_measured, remembering.sets_remembered
    file = None
    try:
        file = _Calibration(plan, remembering).found()
        text = f"topology file: {file.summary}"
    except _RefusedError as refused:
        text = f"no topology file: {refused}"
    except KeyboardInterrupt:
        return msgspec.structs.replace(plan, cancelled=True)
    return msgspec.structs.replace(
        plan,
        topology=file,
        notices=(*plan.notices, text),
        sets_measured=plan.sets_measured + remembering.sets_measured - measured,
        sets_remembered=plan.sets_remembered + remembering.sets_remembered - remembered,
    )


class _Score(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """How good a description is; the largest is best, field by field."""

    fallbacks_ended: int
    gain: float
    order_kept: float
    near: float
    unchanged: int

    @property
    def helps(self) -> bool:
        """Whether it is worth a file."""
        return self.fallbacks_ended > 0 or self.gain >= WORTH


class _Calibration:
    """One plan's search for a description."""

    def __init__(self, plan: Plan, source: RememberingSource) -> None:
        self.plan, self.machine = plan, plan.machine
        self._check()
        self.same = SAME_SIMULATED if source.simulated else SAME_MEASURED
        # A model is cheap to ask; on hardware what a symmetry exchanges is measured once.
        symmetry = None if source.simulated else automorphisms(plan.machine, plan.knowledge)
        self.judge = StockJudge(
            plan.knowledge,
            plan.settings,
            source,
            symmetry=symmetry,
            sets=None if source.simulated else MOST_MEASURED,
        )
        self.own: dict[Subset, Worth | None] = {}
        self.singles = self._singles()

    def _check(self) -> None:
        plan = self.plan
        if version_facts(plan.settings.version).name not in _CHECKED_VERSIONS:
            known = " and ".join(_CHECKED_VERSIONS)
            raise _RefusedError(f"what NCCL makes of one was checked for versions {known} only")
        if any(not node.vendor for node in plan.machine.numa_nodes):
            raise _RefusedError(
                "nobody knows what CPUs the machine has, and so what NCCL believes now"
            )
        if any(link.kind != "nvlink" for link in plan.machine.nvlinks):
            raise _RefusedError("it cannot say what C2C or XGMI links carry")
        seen = view(plan.machine, plan.knowledge, plan.settings, gpus=plan.gpus)
        pairs = permutations((f"G{gpu}" for gpu in plan.gpus), 2)
        if all(seen.paths[pair].type == PathType.NVL for pair in pairs):
            raise _RefusedError(
                "all GPUs are joined by NVLink, whose rates NCCL takes from the GPU and no file "
                "can change"
            )

    def found(self) -> TopologyFile:
        """The best description that harms no set of GPUs.

        Raises:
            _RefusedError: there is none that is better than the machine as it is.
        """
        try:
            return self._found()
        except OutOfSetsError:
            raise _RefusedError(
                f"more than {MOST_MEASURED} sets would have to be measured to know that it harms "
                "none"
            ) from None

    def _found(self) -> TopologyFile:
        sets = subsets_to_check(self.machine, self.plan.gpus)
        few = sieve(sets)
        scored = []
        for belief in self._beliefs():
            score = self._score(belief, few)
            if score is not None and score.helps:
                scored.append((score, belief))
        scored.sort(key=lambda one: one[0], reverse=True)
        for _, belief in scored[:MOST_TRIED]:
            score = self._score(belief, sets)
            if score is not None and score.helps:
                return self._file(belief, score, sets)
        raise _RefusedError(
            "no description that it can hold makes NCCL's own choice better without making it "
            "worse for other sets of GPUs"
        )

    def _beliefs(self) -> Sequence[Belief]:
        plan = self.plan
        found = beliefs(plan.machine, self._carried()) if self.singles else ()
        return [one for one in found if one.changes and self._reaches_nics_alike(one.machine)]

    def _singles(self) -> dict[Pair, float]:
        """What each hop carries by itself under the plan's settings."""
        plan = self.plan
        try:
            space = hop_space(plan.machine, plan.knowledge, plan.settings, gpus=plan.gpus)
            return {
                (hop.source, hop.target): self.judge.slowest(transfer_set([hop.flow]))
                for hop in space
            }
        except (SearchError, MeasurementError, OutOfSetsError):
            return {}

    def _carried(self) -> dict[str, float]:
        """PCI device -> the most that a hop over its link up was seen to carry."""
        carried: dict[str, float] = {}
        for pair, rate in self.singles.items():
            above = [{f"G{gpu}", *self.machine.ancestors(f"G{gpu}")} for gpu in pair]
            for device in above[0] ^ above[1]:
                if device in self.machine.links:
                    carried[device] = max(carried.get(device, 0.0), rate)
        return carried

    def _reaches_nics_alike(self, machine: Machine) -> bool:
        """Whether GPUs prefer the same NICs over paths of the same types.

        Jobs of several nodes read the file too, and no source of one machine tells what other NICs
        would do to them.
        """
        return self._to_nics(machine) == self._to_nics(self.machine)

    def _to_nics(self, machine: Machine) -> list[object]:
        seen = view(machine, self.plan.knowledge, self.plan.settings)
        types = {
            pair: path.type
            for pair, path in seen.paths.items()
            if {pair[0][0], pair[1][0]} == {"G", "N"}
        }
        gpus = sorted(seen.system.gpus)
        return [types, [local_nets(seen.system, seen.paths, gpu) for gpu in gpus]]

    def _score(self, belief: Belief, sets: Sequence[Subset]) -> _Score | None:
        """None if some set of GPUs would lose."""
        logs, near, ended = [], [], 0
        for gpus in sets:
            own, other = self._own(gpus), self.judge.worth(belief.machine, gpus)
            if own is None or other is None:
                if own is not other:
                    return None
                continue
            if other.rate_gbps < own.rate_gbps * (1 - self.same) or (
                other.fallback and not own.fallback
            ):
                return None
            ended += own.fallback and not other.fallback
            logs.append(math.log(other.rate_gbps / own.rate_gbps))
            near.append(abs(math.log(other.believed_gbps / other.rate_gbps)))
        if not logs:
            return None
        seen = view(belief.machine, self.plan.knowledge, self.plan.settings, gpus=self.plan.gpus)
        return _Score(
            fallbacks_ended=ended,
            gain=round(math.expm1(sum(logs) / len(logs)), 3),
            order_kept=round(order_kept(seen, self.singles), 2),
            near=-round(sum(near) / len(near), 2),
            unchanged=-len(belief.changes),
        )

    def _own(self, gpus: Subset) -> Worth | None:
        if gpus not in self.own:
            self.own[gpus] = self.judge.worth(self.machine, gpus)
        return self.own[gpus]

    def _file(self, belief: Belief, score: _Score, sets: Sequence[Subset]) -> TopologyFile:
        own, other = self._own(self.plan.gpus), self.judge.worth(belief.machine, self.plan.gpus)
        assert own is not None
        assert other is not None
        every = len(self.plan.gpus) <= ALL_SETS_UP_TO
        return TopologyFile(
            machine=belief.machine,
            changes=belief.changes,
            cannot_say=self._cannot_say(other),
            sets_checked=len(sets),
            all_sets_checked=every,
            fallbacks_ended=score.fallbacks_ended,
            mean_gain=score.gain,
            own_gbps=own.rate_gbps,
            rate_gbps=other.rate_gbps,
            believed_gbps=other.believed_gbps,
        )

    def _cannot_say(self, worth: Worth) -> tuple[str, ...]:
        plan = self.plan
        said = [
            "which transfers slow each other down: NCCL adds up what links carry and knows no more"
        ]
        if len({ring.gpus for ring in plan.rings}) > 1:
            said.append("that channels should run different rings, as the plan's do")
        if worth.rate_gbps < plan.rate_gbps * (1 - WORTH):
            said.append(
                f"the plan's rings: over all its GPUs NCCL's own choice then gets "
                f"{worth.rate_gbps:.2f} GB/s, with the graph file {plan.rate_gbps:.2f}"
            )
        across = [
            rate
            for (one, other), rate in self.singles.items()
            if self.machine.numa_of(f"G{one}") != self.machine.numa_of(f"G{other}")
        ]
        if len(self.machine.numa_nodes) > 2 and max(across) > min(across) * 1.1:
            said.append("that some CPUs are farther apart than others: one figure holds for all")
        return tuple(said)


def order_kept(seen: View, singles: dict[Pair, float]) -> float:
    """How much of the measured order of pairs NCCL's view has, 0 to 1; equals count half.

    Pairs whose rates differ by less than a twentieth have no order.
    """
    pairs = [
        (rate, seen.paths[f"G{source}", f"G{target}"].gbps)
        for (source, target), rate in singles.items()
    ]
    kept = counted = 0.0
    for (rate, believed), (other_rate, other_believed) in combinations(pairs, 2):
        if abs(rate - other_rate) <= 0.05 * max(rate, other_rate):
            continue
        counted += 1
        if believed == other_believed:
            kept += 0.5
        else:
            kept += (rate > other_rate) == (believed > other_believed)
    return kept / counted if counted else 1.0


def subsets_to_check(machine: Machine, gpus: Sequence[int]) -> tuple[Subset, ...]:
    """All of the GPUs first, then every smaller set of two or more, or some of very many.

    Those are the GPUs below each bridge and NUMA node, and SETS_DRAWN sets of up to 8.
    """
    whole = tuple(sorted(gpus))
    if len(whole) <= ALL_SETS_UP_TO:
        smaller = [
            one for size in range(len(whole) - 1, 1, -1) for one in combinations(whole, size)
        ]
        return (whole, *smaller)
    below: dict[str, list[int]] = {}
    for gpu in whole:
        for device in machine.ancestors(f"G{gpu}"):
            below.setdefault(device, []).append(gpu)
    draw = random.Random(0)
    sizes = [2 + number % (ALL_SETS_UP_TO - 1) for number in range(SETS_DRAWN)]
    drawn = [tuple(sorted(draw.sample(whole, size))) for size in sizes]
    groups = [tuple(group) for group in below.values() if len(group) > 1]
    return tuple(dict.fromkeys((whole, *groups, *drawn)))


def sieve(sets: Sequence[Subset]) -> tuple[Subset, ...]:
    """Some of the sets, the first among them: enough to see which descriptions are promising."""
    if len(sets) <= SETS_TO_SIEVE:
        return tuple(sets)
    drawn = random.Random(1).sample(sets[1:], SETS_TO_SIEVE - 1)
    return (sets[0], *drawn)
