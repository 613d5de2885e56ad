"""The Verification: what was found of a plan, with its evidence, and its file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tccl_py.plan.beside import keep_beside_plan, read_beside_plan
from tccl_py.runtimes.nccl.settings import Settings
from tccl_py.verification.comparison import Compared, Verdict
from tccl_py.verification.orders import Backend, Wrong
from tccl_py.verification.rings import RingsFound

FORMAT_VERSION = 1
VERIFICATION_FILE = "verify.json"


class SizeResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size: seconds a call in every pair's jobs, and plan over stock.

    The bandwidths are medians over all pairs, GB/s of bus bandwidth.
    """

    bytes: int
    plan_seconds: tuple[float, ...]
    stock_seconds: tuple[float, ...]
    plan_gbps: float
    stock_gbps: float
    compared: Compared
    verdict: Verdict


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds a step of the training-shaped load, medians of both sides; `mode` eager or graph."""

    mode: str
    plan_seconds: tuple[float, ...]
    stock_seconds: tuple[float, ...]
    compared: Compared
    verdict: Verdict


class Tried(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings tried on the real thing: bus bandwidth at the largest sizes; why it failed, if so.

    `settings` is None for stock, `low` the worst ratio to stock's slowest job at any size.
    """

    settings: Settings | None
    gbps: float = 0.0
    low: float = 0.0
    failed: str = ""


class Verification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What real collectives did under a plan and without.

    `plan_gbps` and `stock_gbps` are bus bandwidths at the largest sizes, to hold against
    `predicted_gbps`, which of a `tuned` plan is what one job achieved. `order` says which side each
    job was, in turn: A the plan, B stock. `raw` has each job's timings: seconds a call, by size,
    rank and batch. `failure` is why the plan's job did not run; nothing was compared then.
    `at_once` jobs ran at the same time and took turns. Of several hosts `hosts` are the names in
    rank order, `gpus` none, and rings have ranks in place of GPUs.
    """

    machine: str
    gpus: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    backend: Backend
    verdict: Verdict | None
    plan_gbps: float | None
    stock_gbps: float | None
    predicted_gbps: float
    simulated: bool
    assumed: bool
    collective: str
    sizes: tuple[SizeResult, ...]
    checked: int
    wrong: tuple[Wrong, ...]
    left_out: tuple[str, ...]
    rings: RingsFound | None
    settings: Settings
    plan_environment: dict[str, str]
    stock_environment: dict[str, str]
    versions: dict[str, str]
    devices: tuple[str, ...]
    order: str
    raw: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    seconds: float
    at_once: int = 1
    tuned: bool = False
    training: tuple[Training, ...] = ()
    tried: tuple[Tried, ...] = ()
    failure: str = ""
    notices: tuple[str, ...] = ()
    plan_digest: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def accepted(self) -> bool:
        """Whether the plan may be used: right, its own rings, and nowhere slower than stock."""
        as_planned = self.rings is None or self.rings.same
        slower = self.verdict == "worse" or any(one.verdict == "worse" for one in self.training)
        return not (self.failure or self.wrong or slower) and as_planned

    @property
    def worse_sizes(self) -> tuple[int, ...]:
        """Sizes, in bytes, for which the plan is not recommended."""
        return tuple(one.bytes for one in self.sizes if one.verdict == "worse")


def keep_verification(found: Verification, directory: Path) -> Verification:
    """Write verify.json beside a plan, whole or not at all; gives what was written.

    Raises:
        InputError: it cannot be written.
    """
    return keep_beside_plan(found, directory / VERIFICATION_FILE)


def load_verification(directory: Path) -> Verification | None:
    """What was verified of the plan in a directory; None if nothing was, or of an earlier plan.

    Raises:
        InputError: the file is unreadable, of another version, or damaged.
    """
    path = directory / VERIFICATION_FILE
    if not path.exists():
        return None
    return read_beside_plan(path, Verification, version=FORMAT_VERSION)
