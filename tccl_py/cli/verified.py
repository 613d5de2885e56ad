"""What verifying a machine's plan and a cluster's have in common: tuning, interrupts, what is kept,
who watches, and what is said."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tccl_py.cli.arguments import notice, notice_each, notices
from tccl_py.cli.interrupts import CTRL_C_AND_SIGTERM, Terminated, interrupts_put_off, undisturbed
from tccl_py.errors import InputError, TcclError
from tccl_py.health.fitness import why_not_with
from tccl_py.plan.plan import ChoiceName
from tccl_py.readers.nvml import driver_version
from tccl_py.report.words import choice_words
from tccl_py.verify.jobs import Launcher
from tccl_py.verify.record import Verification, keep_verification
from tccl_py.verify.target import TuningTarget
from tccl_py.verify.tuning import COMPARISON_SECONDS, run_tuning
from tccl_py.verify.verify import RunBudget, Watcher, verify_target

_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)
_SYSTEM_CONF = Path("/etc/nccl.conf")


def verified(
    plan: TuningTarget,
    directory: Path,
    launcher: Launcher,
    budget: RunBudget,
    *,
    also_tune: bool,
    only: ChoiceName | None = None,
) -> Verification:
    """Verify all choices, or `only` one, tune if asked to, and keep what was found with the plan.

    An interrupt or an error while settings are tried leaves the plan as it was, and what was
    verified of it.
    """
    if also_tune:
        budget = msgspec.structs.replace(budget, seconds=min(budget.seconds, COMPARISON_SECONDS))
    with watcher() as watch, interrupts_put_off(CTRL_C_AND_SIGTERM):
        try:
            target = plan.target() if only is None else plan.target().narrowed(only)
            found = verify_target(target, launcher, budget, watch=watch)
        except (KeyboardInterrupt, Terminated):
            notice(f"interrupted: nothing in {directory} was changed")
            raise
        if not also_tune:
            return _kept(found, directory)
        try:
            tuned = run_tuning(plan, launcher, budget, found, watch=watch)
        except (KeyboardInterrupt, Terminated, TcclError) as error:
            _kept(found, directory)
            why = "not tuned" if isinstance(error, TcclError) else "interrupted"
            notice(f"{why}: the plan is as it was, and what was verified of it is kept")
            raise
    if tuned.plan is plan:
        notice("tuned: nothing that was tried is better, and the plan stays as it is")
        return _kept(tuned.verification, directory)
    return _kept(tuned.verification, directory, tuned=tuned.plan)


def _kept(
    found: Verification, directory: Path, *, tuned: TuningTarget | None = None
) -> Verification:
    """Write what was found of a plan, and before it the plan if it was tuned."""
    found = with_conditions(found)
    with undisturbed():
        if tuned is not None:
            tuned.write()
            notice(f"tuned: {choice_words(found.chosen, found.judged.settings)}")
        return keep_verification(found, directory)


@contextmanager
def watcher() -> Iterator[Watcher]:
    """Shows what runs on stderr, where somebody watches."""
    console = notices()
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield status.update


def check_kept(names: Sequence[str]) -> None:
    """Refuse names that --keep cannot have.

    Raises:
        InputError: no NCCL variable, or the one that is compared.
    """
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise InputError(
                f"--keep {name[:40]!r}", "is no NCCL variable", "a name such as NCCL_P2P_DISABLE"
            )
        if name == "NCCL_GRAPH_FILE":
            raise InputError(f"--keep {name}", "is what is compared", "leave it out")


def with_conditions(found: Verification) -> Verification:
    """What was found with the versions here and with what is to be said of it, which is said."""
    cuda = found.backend == "cuda"
    versions = {**found.versions, **({"driver": driver_version()} if cuda else {})}
    nccl = found.versions.get("nccl", "")
    said = [*found.notices]
    if not cuda:
        said.append("a rehearsal over gloo: no figure says anything of GPUs or of NCCL")
    elif other := (why_not_with(found.judged.settings, nccl) if nccl else ""):
        said.append(f"jobs here get default NCCL instead of the plan: {other}")
    if cuda and _SYSTEM_CONF.exists():
        said.append(f"{_SYSTEM_CONF} holds for all arms, default NCCL as well")
    notice_each(said)
    return msgspec.structs.replace(found, versions=versions, notices=tuple(said))
