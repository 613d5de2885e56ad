"""Count false alarms of `tccl check` on machines with nothing but noise, and its detections."""

from __future__ import annotations

import argparse

from tests.drifting import checked, exact_rates, journalled, with_slower_link

CHECKS = 300
MACHINES = ("intel-v100", "amd-v100", "h200x4-vm")
NOISES = ((0.01, 0.0), (0.02, 0.0), (0.05, 0.0), (0.01, 0.01), (0.02, 0.02))
"""Spread of samples, and additional spread of whole measurements."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machines", nargs="*", default=MACHINES)
    parser.add_argument("--checks", type=int, default=CHECKS)
    wanted = parser.parse_args()
    for name in wanted.machines:
        print(f"{name}: {wanted.checks} checks without a change, {wanted.checks // 10} with one")
        for noise, between in NOISES:
            report(name, noise, between, wanted.checks)


def report(name: str, noise: float, between: float, checks: int) -> None:
    case = journalled(name, noise)
    false = sum(
        checked(case, noise=noise, between=between, seed=seed).drifted for seed in range(checks)
    )
    found = []
    gpus = case.model.machine.gpu_indices
    slower = {
        (gpu, left): exact_rates(with_slower_link(case.model, f"G{gpu}", left))
        for gpu in gpus
        for left in (0.9, 0.5)
    }
    for left in (0.9, 0.5):
        hits = named = 0
        for seed in range(checks // 10):
            gpu = gpus[seed % len(gpus)]
            now = slower[gpu, left]
            drift = checked(case, noise=noise, between=between, seed=10_000 + seed, now=now)
            hits += drift.drifted
            words = drift.points_to
            named += words.startswith(f"GPU {gpu}'s") and " or " not in words
        found.append(f"{1 - left:.0%} off one GPU's link: {hits} found, {named} by its name alone")
    print(
        f"  noise {noise:.0%}, between measurements {between:.0%}: {false} false alarms; "
        + "; ".join(found),
        flush=True,
    )


if __name__ == "__main__":
    main()
