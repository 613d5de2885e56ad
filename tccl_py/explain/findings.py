"""What an explanation says: findings, one list for each set of rings; and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tccl_py.plan.directory import keep_beside_plan, read_beside_plan

FORMAT_VERSION = 1
EXPLANATION_FILE = "explanation.json"


class Instead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same GPU pairs by another mechanism (`direct write`, `direct read`, `bounce`)."""

    kind: str
    gbps: float


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transfers that are slow together, none of which can be left out.

    `gbps` is the slowest flow's rate with all of them running, `alone_gbps` the slowest's with each
    alone; `slowdown` is how many times lower the first is. A single flow that is slow for the way
    it moves bytes has the best other way's rate as `alone_gbps`. `each_gbps` and `each_alone_gbps`
    are of each flow, `error` the relative standard error of `gbps`. `shares` names what the flows
    share, `kinds` how they move bytes. `alike` more sets of the same rings are slow in the same
    way, as measured or by the machine's symmetry. `minimal` is false if it was not measured that
    none can be left out.
    """

    flows: tuple[str, ...]
    gbps: float
    alone_gbps: float
    slowdown: float
    each_gbps: tuple[float, ...]
    each_alone_gbps: tuple[float, ...]
    error: float
    shares: tuple[str, ...]
    kinds: tuple[str, ...]
    instead: tuple[Instead, ...] = ()
    alike: int = 0
    minimal: bool = True
    sentence: str = ""

    @property
    def total_gbps(self) -> float:
        """All flows of the finding together."""
        return sum(self.each_gbps)


class RingExplanation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why rings are as fast as they are.

    `rate_gbps` is their score; `slowest` the hop that gets least by itself, or None if that is not
    known: without findings it is what limits the rings. `findings` are the worst first.
    `unexplained` says what is left open, or is empty.
    """

    name: Literal["plan", "stock"]
    rings: int
    rate_gbps: float
    slowest: Finding | None
    findings: tuple[Finding, ...]
    unexplained: str
    sentence: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which transfers hurt which on a plan's machine.

    `avoided` are slow sets of other rings that the plan's journal holds. `plan_digest` is that of
    the plan.json it speaks of, where it was read from a directory.
    """

    machine: str
    simulated: bool
    assumed: bool
    rings: tuple[RingExplanation, ...]
    avoided: tuple[Finding, ...]
    sets_measured: int
    notices: tuple[str, ...] = ()
    plan_digest: str = ""
    format_version: int = FORMAT_VERSION


def save_explanation(explanation: Explanation, directory: Path) -> Explanation:
    """Write `explanation.json` beside the plan that it is of; returns what was written.

    Raises:
        InputError: the place cannot be written.
    """
    return keep_beside_plan(explanation, directory / EXPLANATION_FILE)


def load_explanation(directory: Path) -> Explanation | None:
    """The explanation of the plan that is in `directory` now; None if there is none of it.

    Raises:
        InputError: the file is damaged or of another format version.
    """
    path = directory / EXPLANATION_FILE
    if not path.is_file():
        return None
    return read_beside_plan(path, Explanation, version=FORMAT_VERSION)
