"""Count false alarms of `tccl check` on machines with nothing but noise, and its detections.

With --preflight those of `check --preflight`: of transfers, or of collectives whose jobs have the
same noise. Each preflight has a verification of its own to compare with.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from tccl_py.experiments.comparison import RunBudget
from tccl_py.experiments.preflight import FAMILIES, check_collectives
from tccl_py.experiments.spec import MIB
from tccl_py.experiments.target import Target
from tccl_py.experiments.verify import verify_target
from tccl_py.health.drift import Effort
from tests.drifting import checked, exact_rates, journalled, with_slower_link
from tests.verified import FakeJobs, dry_run

CHECKS = 300
MACHINES = ("intel-v100", "amd-v100", "h200x4-vm")
NOISES = ((0.01, 0.0), (0.02, 0.0), (0.05, 0.0), (0.01, 0.01), (0.02, 0.02))
"""Spread of samples, and additional spread of whole measurements."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machines", nargs="*", default=MACHINES)
    parser.add_argument("--checks", type=int, default=CHECKS)
    parser.add_argument("--preflight", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.machines:
        checks = arguments.checks
        print(f"{name}: {checks} checks without a change, {checks // 10} with one")
        for noise, spread in NOISES:
            if arguments.preflight:
                report_preflights(name, noise, spread, checks)
            else:
                report(name, noise, spread, checks)


def report(name: str, noise: float, between: float, checks: int) -> None:
    case = journalled(name, noise)
    false = sum(
        checked(case, noise=noise, between=between, seed=seed).has_drifted for seed in range(checks)
    )
    detections = []
    gpus = case.model.machine.gpu_indices
    slower = {
        (gpu, share): exact_rates(with_slower_link(case.model, f"G{gpu}", share))
        for gpu in gpus
        for share in (0.9, 0.5)
    }
    for share in (0.9, 0.5):
        hits = named = 0
        for seed in range(checks // 10):
            gpu = gpus[seed % len(gpus)]
            slowed = slower[gpu, share]
            drift = checked(case, noise=noise, between=between, seed=10_000 + seed, now=slowed)
            hits += drift.has_drifted
            words = drift.points_to
            named += words.startswith(f"GPU {gpu}'s") and " or " not in words
        lost = f"{1 - share:.0%} off one GPU's link"
        detections.append(f"{lost}: {hits} found, {named} by its name alone")
    print(
        f"  noise {noise:.0%}, between measurements {between:.0%}: {false} false alarms; "
        + "; ".join(detections),
        flush=True,
    )


def report_preflights(name: str, noise: float, between: float, checks: int) -> None:
    case = journalled(name, noise)
    target = Target(plan=case.plan, directory=Path("unused"), graphs={"": ""})
    budget = RunBudget(rounds=6, sizes=(64 * MIB, 256 * MIB, 1024 * MIB), seconds=0)
    false = {1.0: 0, 0.9: 0}
    for seed in range(checks):
        effort = Effort(seed=seed, families=FAMILIES)
        drift = checked(case, noise=noise, between=between, seed=seed, effort=effort)
        for speed in false if seed % 10 == 0 else (1.0,):
            before, after = (
                dry_run(case.plan, FakeJobs(seconds(rate), noise=max(noise, between), seed=draw))
                for draw, rate in ((2 * seed, 1.0), (2 * seed + 1, speed))
            )
            found = check_collectives(target, after, verify_target(target, before, budget))
            healthy = replace(found, drift=drift).ok
            false[speed] += not healthy
    words = f"  noise {noise:.0%}, between measurements {between:.0%}: "
    words += f"{false[1.0]} of {checks} healthy machines fail"
    slower = f"{false[0.9]} of {checks // 10} with 10% slower collectives"
    print(f"{words}; {slower}", flush=True)


def seconds(speed: float) -> Callable[[int, object], float]:
    return lambda size, _: (1e-4 + size / 1e11) / speed


if __name__ == "__main__":
    main()
