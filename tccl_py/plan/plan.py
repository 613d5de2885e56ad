"""The Plan: rings, the settings that realise them, what to expect, and how good that is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json, read_text, write_atomically
from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.nccl.settings import Settings, environment
from tccl_py.plan.checks import check_plan
from tccl_py.plan.staging import PLAN_FILE, check_if_listed, settle

FORMAT_VERSION = 2
AS_GOOD = 0.01
"""A choice this much slower than the best (relative) is as good."""


class PlanHop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One hop of a planned ring: its flow's text form and its rate beside all others, GB/s."""

    source: int
    target: int
    flow: str
    gbps: float


class PlanRing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ring of the plan, from its lowest GPU on."""

    hops: tuple[PlanHop, ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPU indices in ring order."""
        return tuple(hop.source for hop in self.hops)

    @property
    def bottleneck(self) -> PlanHop:
        """The slowest hop."""
        return min(self.hops, key=lambda hop: hop.gbps)

    @property
    def rate(self) -> float:
        """What this ring carries beside the others, GB/s: the rate of its slowest hop."""
        return self.bottleneck.gbps


ChoiceName = Literal["default", "variables", "graph"]
CHOICES: tuple[ChoiceName, ...] = get_args(ChoiceName)
"""Ways to run NCCL, the smallest intervention first."""


class PlanChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to run NCCL over the plan's GPUs.

    `rings` has a GPU order for each channel. `rate_gbps` is the predicted bus bandwidth in GB/s,
    None where no source can rate it; `error` half the 95 % interval of it, relative. `note` says
    what is special.
    """

    settings: Settings
    rings: tuple[tuple[int, ...], ...]
    rate_gbps: float | None
    error: float = 0.0
    assumed: bool = False
    note: str = ""


class Alternative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other settings that were searched, and the best found under them, GB/s."""

    settings: Settings
    rings_in_set: int
    rate_gbps: float


class SubsetRings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rings for a communicator over some of the GPUs, under the plan's settings; rate in GB/s."""

    gpus: tuple[int, ...]
    rings: tuple[tuple[int, ...], ...]
    rate_gbps: float


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rings for one machine, what is known about them, and what NCCL gets without them.

    `stock` is default NCCL, `variables` the best by environment variables alone, and the rest is
    about a graph file; `recommended` names the smallest of the three that is as good as the best.

    `rings` are the different rings of the set; channels take them in turn. `rate_gbps` is what a
    collective's bus bandwidth is predicted to be; no ring set searched exceeds `bound_gbps` under
    these settings. `limit_gbps` is the rate of bare concurrent copies over the hops of the
    recommended choice, None where no source can measure them. `kept` are NCCL variables, by name,
    that all jobs have, with the plan or without: settings keep to them, and `stock` has them too.
    `simulated` and `assumed` say where the figures come from, and go wherever the plan goes. Rates
    of a `tuned` plan are what jobs of each choice achieved, and `winner` is the choice that they
    found best.
    """

    machine: Machine
    knowledge: Knowledge
    gpus: tuple[int, ...]
    settings: Settings
    settings_verified: bool
    rings: tuple[PlanRing, ...]
    type_intra: str
    rate_gbps: float
    bound_gbps: float | None
    proven: bool
    simulated: bool
    assumed: bool
    strategy: str
    sets_measured: int
    sets_remembered: int
    sets_by_symmetry: int
    stock: PlanChoice
    variables: PlanChoice
    error: float = 0.0
    limit_gbps: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    subsets: tuple[SubsetRings, ...] = ()
    notices: tuple[str, ...] = ()
    kept: dict[str, str] = {}
    cancelled: bool = False
    tuned: bool = False
    winner: ChoiceName | None = None
    format_version: int = FORMAT_VERSION

    @property
    def provenance(self) -> str:
        """`measured`, `simulated`, or `simulated from assumed figures`."""
        if not self.simulated:
            return "measured"
        return "simulated from assumed figures" if self.assumed else "simulated"

    @property
    def choices(self) -> dict[ChoiceName, PlanChoice]:
        """The three ways to run NCCL, the smallest intervention first."""
        graph = PlanChoice(
            settings=self.settings,
            rings=self.channel_rings,
            rate_gbps=self.rate_gbps,
            error=self.error,
            assumed=self.assumed,
        )
        return {"default": self.stock, "variables": self.variables, "graph": graph}

    @property
    def recommended(self) -> ChoiceName:
        """The smallest choice within 1 % of the best, or within its interval if that is wider.

        Of a tuned plan it is the one that jobs found so.
        """
        if self.winner is not None:
            return self.winner
        best = max(one.rate_gbps or 0.0 for one in self.choices.values())
        return next(
            name
            for name, one in self.choices.items()
            if (one.rate_gbps or 0.0) * (1 + max(AS_GOOD, one.error)) >= best
        )

    @property
    def job_settings(self) -> Settings:
        """The settings of the recommended choice."""
        return self.choices[self.recommended].settings

    @property
    def advice(self) -> str:
        """What to do, in a sentence or two."""
        name, gain = self.recommended, self.gain(self.recommended)
        times = "" if gain is None else f": {gain:.2f}x default NCCL ({self.expected})"
        variables = " ".join(f"{k}={v}" for k, v in environment(self.job_settings).items())
        if name == "default":
            return "Leave NCCL as it is. No variable or graph file is clearly faster."
        if name == "variables":
            return f"Set {variables}{times}. No graph file is needed."
        if not variables:
            return f"Use the graph file{times}."
        return f"Use the graph file and set {variables}{times}."

    @property
    def expected(self) -> str:
        """What the rates of the choices rest on."""
        if self.tuned:
            return "achieved by jobs"
        return self.provenance if self.simulated else "predicted from measurements"

    def gain(self, name: ChoiceName) -> float | None:
        """How many times default NCCL a choice is; None where default NCCL is not rated."""
        rate, default = self.choices[name].rate_gbps, self.stock.rate_gbps
        return None if not rate or not default else rate / default

    @property
    def limit_text(self) -> str:
        """What the limit is of, and how close the recommended choice comes; "" if not known."""
        rate = self.choices[self.recommended].rate_gbps
        if not rate or not self.limit_gbps:
            return ""
        if rate > self.limit_gbps * (1 + AS_GOOD):
            return "bare copies over the same hops, no faster than the plan"
        share = min(1.0, rate / self.limit_gbps)
        return f"bare copies over the same hops; the plan gets {share:.0%} of it"

    @property
    def channel_rings(self) -> tuple[tuple[int, ...], ...]:
        """GPU orders, one for each channel of the graph file."""
        return per_channel([ring.gpus for ring in self.rings], self.settings.channels)

    def subset(self, gpus: Iterable[int]) -> SubsetRings | None:
        """The rings planned for exactly these GPUs, or None."""
        wanted = tuple(sorted(gpus))
        if wanted == self.gpus:
            orders = tuple(ring.gpus for ring in self.rings)
            return SubsetRings(gpus=wanted, rings=orders, rate_gbps=self.rate_gbps)
        return next((one for one in self.subsets if one.gpus == wanted), None)

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON, whole or not at all.

        Raises:
            InputError: the place cannot be written.
        """
        write_atomically(Path(path), encode_json(self))


def proof_text(rings: int, *, proven: bool) -> str:
    """Say whether a plan of so many rings is proven best, and among which rings.

    >>> proof_text(2, proven=True)
    'proven best within 1 % among sets of 2 rings under these settings'
    """
    if not proven:
        return "not proven best"
    among = "single rings" if rings == 1 else f"sets of {rings} rings"
    return f"proven best within 1 % among {among} under these settings"


def per_channel(rings: Iterable[tuple[int, ...]], channels: int) -> tuple[tuple[int, ...], ...]:
    """Deal rings out to channels in turn.

    >>> per_channel([(0, 1), (1, 0)], 4)
    ((0, 1), (1, 0), (0, 1), (1, 0))
    """
    orders = list(rings)
    return tuple(orders[channel % len(orders)] for channel in range(channels))


def plan_file(path: Path) -> Path:
    """Return the file of a plan: `path` itself, or plan.json in a directory.

    Raises:
        InputError: the directory holds none, or another one than its manifest says.
    """
    if not path.is_dir():
        return path
    settle(path)
    if not (path / PLAN_FILE).exists():
        raise InputError(str(path), f"holds no {PLAN_FILE}", "name a directory of `tccl plan`")
    check_if_listed(path, PLAN_FILE)
    return path / PLAN_FILE


def load_plan(path: Path | str) -> Plan:
    """Read a plan file, or `plan.json` in a directory.

    Raises:
        InputError: unreadable, of a cluster, another format version, damaged, or parts that do not
            fit together.
    """
    path = plan_file(Path(path))
    text = read_text(path)
    # Another kind or version may have other fields: it is refused by what it says of itself.
    head = decode_json(text, _Head, where=str(path), name="Plan")
    if head.kind == "cluster":
        right = "`tccl show`, `tccl env`, `tccl export` and load_cluster_plan read those"
        raise InputError(str(path), "is the plan of a cluster", right)
    version = head.format_version
    if version != FORMAT_VERSION:
        raise InputError(
            str(path),
            f"has format version {version}",
            f"this program reads version {FORMAT_VERSION}: plan again with --force; what the "
            "journal beside it has is not measured again",
        )
    return check_plan(decode_json(text, Plan, where=str(path)), where=str(path))


class _Head(msgspec.Struct):
    """The part of a plan file that all kinds and versions have."""

    format_version: int
    kind: str = ""
