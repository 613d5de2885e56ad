"""What `tccl plan` is asked for, as one value."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from tccl_py.errors import InputError
from tccl_py.files import check_value
from tccl_py.nccl.settings import PINNABLE, check_pinnable, pinned_level, pinned_values
from tccl_py.search.problem import Budget
from tccl_py.search.strategies import Strategy, strategy_name

if TYPE_CHECKING:
    from tccl_py.sources.profiled import MeasurementOptions

MOST_SETS = 2000
DEFAULT_BUDGET = Budget(sets=MOST_SETS, idle_sets=100)


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is planned for, what gives the rates, and how rings are searched; None is not given.

    `simulate` names a model; without it rates are measured here, or by the hosts of a job. `nodes`
    and `hosts` are simulated ones, and with `extend`, the directory of a cluster's plan, those that
    it grows by. The fields from `version` on are as `make_plan` and `make_cluster_plan` take them,
    and all that `plan_hosts` reads; the others are as the options of `tccl plan`.
    """

    simulate: str | None = None
    p2p: bool | None = None
    noise: float | None = None
    seed: int | None = None
    backend: str | None = None
    devices: int | None = None
    target: float | None = None
    interfaces: str | None = None
    nodes: int | None = None
    hosts: str | None = None
    switches: Path | None = None
    extend: Path | None = None
    gpus: str | None = None
    version: str | None = None
    pinned_env: Mapping[str, str] = {}
    ring_counts: tuple[Annotated[int, msgspec.Meta(ge=1)], ...] | None = None
    strategy: str | Strategy = "best-first"
    budget: Budget = DEFAULT_BUDGET
    subsets: bool | None = None
    keep_order: bool = False
    ib_gid_index: int | None = None
    subnet_prefix: int | None = None
    gpus_per_job: str | None = None

    def __post_init__(self) -> None:
        strategy_name(self.strategy)  # Raises InputError
        for field in msgspec.structs.fields(self):
            if field.name != "strategy":
                check_value(getattr(self, field.name), field.type, where=f"`{field.name}`")
        if self.target is not None:
            _ = self.options  # Raises InputError

    @property
    def options(self) -> MeasurementOptions:
        """The options of measurements."""
        from tccl_py.sources.profiled import search_options  # noqa: PLC0415 (of hardware)

        return search_options(self.backend, self.target)

    @property
    def names_hosts(self) -> bool:
        """Whether several hosts are simulated or named, where no job has them."""
        simulated = self.simulate is not None and self.hosts is not None
        return self.nodes not in (None, 1) or self.extend is not None or simulated


def pinned_here(names: Sequence[str]) -> dict[str, str]:
    """Return the variables of these names as they are set here, and as NCCL reads them."""
    for name in names:
        check_pinnable(name, where="`pin_env`")
        if name not in os.environ:
            right = f"set it as all jobs have it, as in `{name}=... tccl plan`"
            raise InputError(f"`pin_env` {name}", "is not set here", right)
    return pinned_values({name: os.environ[name] for name in names}, where="`pin_env`")


def not_pinned(names: Collection[str]) -> tuple[str, ...]:
    """Return notices on variables that are set here, and are not among the pinned `names`."""
    return tuple(
        f"{name}={os.environ[name][:20]} is set here and is not planned for: if all jobs have it, "
        f"give `tccl plan` --pin-env {name}"
        for name in PINNABLE
        if name not in names and pinned_level({name: os.environ.get(name, "")}) is not None
    )
