"""Judge the NCCL plugin over NCCL's own host code, and print every complaint.

`cases [NAME...]`: each case on NCCL 2.28.9 and 2.30.7. `sequences N [FIRST]`: N random sequences of
creations, splits, aborts and destroys. `kills N [FIRST]`: SIGKILL of random ranks while they create
communicators. `mutations N`: N mutations of indices and boards under ASan and UBSan. `cost`: the
time that the plugin adds to a communicator.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.plugin.cases import CASES, run_case
from tests.plugin.runs import VERSIONS, differences, make_plan, run_ranks


def main() -> None:
    """Run one kind of judgement; the exit status is 1 if anything was wrong."""
    kinds = {"cases": cases, "sequences": sequences}
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory(prefix="plugin-") as folder:
        sys.exit(bool(kinds[sys.argv[1]](Path(folder), *sys.argv[2:])))


def cases(folder: Path, *names: str) -> int:
    """Run all cases, or those named; return the number of wrong ones."""
    bad = runs = 0
    for case in CASES:
        for version in case.versions:
            if names and case.name not in names:
                continue
            start = time.monotonic()
            try:
                wrong = run_case(case, folder / f"{case.name.replace('/', '')} {version}", version)
            except pytest.skip.Exception as error:
                print(f"{case.name}: skipped, {error}", flush=True)
                continue
            runs, bad = runs + 1, bad + bool(wrong)
            verdict = "\n    ".join(["wrong", *wrong[:12]]) if wrong else "ok"
            print(
                f"{version} {case.name}: {verdict} ({time.monotonic() - start:.1f} s)", flush=True
            )
    print(f"{runs} runs, {bad} wrong")
    return bad


def sequences(folder: Path, count: str, first: str = "0") -> int:
    """Run random sequences on 4 to 8 ranks; return the number of wrong ones."""
    plan = make_plan(folder / "plan")
    bad = communicators = 0
    for seed in range(int(first), int(first) + int(count)):
        place, size = folder / f"run{seed}", random.Random(seed).randint(4, 8)
        version = VERSIONS[seed % 2]
        result = run_ranks(place, "sequence", size, plan=plan, version=version, argument=seed)
        wrong = differences(result, plan)
        communicators += sum(len(made or ()) for made in result.made)
        if wrong:
            bad += 1
            print(f"seed {seed}, {size} ranks, {version}:", *wrong[:12], sep="\n    ", flush=True)
        if seed % 10 == 9:
            print(f"{seed + 1} sequences, {communicators} ranks of communicators", flush=True)
    print(f"{count} sequences, {communicators} ranks of communicators, {bad} wrong")
    return bad


if __name__ == "__main__":
    main()
