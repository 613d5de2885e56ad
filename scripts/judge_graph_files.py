"""Compare graph files with NCCL 2.30.7's own code (../shared/nccl-host), and print differences.

`plans N` plans N random machines by short simulations. NCCL loads every file, and must run the
plan's rings with whole trees in the planned number of channels. `mutants N` changes these files at
random. NCCL may not refuse, crash on, or load with a broken tree any file that `tccl validate`
calls used.
"""

import random
import sys

from tests.graph_judge import ORACLE
from tests.judged_graph_files import compare_mutants, compare_plans, planned_cases

MUTATED = (0, 1, 2, 3, 5, 6, 9, 12, 15, 30, 33)
"""Seeds of the machines whose files are mutated; some are clusters."""
BATCH = 200


def main() -> None:
    """Run one comparison."""
    if len(sys.argv) < 3 or sys.argv[1] not in ("plans", "mutants") or not ORACLE.exists():
        sys.exit(f"{__doc__}\nNeeds {ORACLE}.")
    count, first = int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    bad = plans(count, first) if sys.argv[1] == "plans" else mutants(count, first)
    sys.exit(bool(bad))


def plans(count: int, first: int) -> int:
    """Compare the plans of `count` machines; return the number of failures."""
    files, bad = 0, 0
    for seed in range(first, first + count):
        found, wrong = compare_plans([seed])
        files, bad = files + found, bad + len(wrong)
        for text in wrong:
            print(text)
        print(f"{seed - first + 1} machines, {files} files, {bad} not run as planned", flush=True)
    return bad


def mutants(count: int, seed: int) -> int:
    """Compare `count` mutants; return the number of failures."""
    cases = [case for one in MUTATED for case in planned_cases(one)]
    total, bad = 0, 0
    kinds: dict[str, int] = {}
    for batch in range(0, count, BATCH):
        found, wrong = compare_mutants(random.Random(f"{seed} {batch}"), cases, BATCH)
        for kind, number in found.items():
            kinds[kind] = kinds.get(kind, 0) + number
        total, bad = total + BATCH, bad + len(wrong)
        for text in wrong:
            print(text)
        print(f"{total} mutants, {kinds}, {bad} called used wrongly", flush=True)
    return bad


if __name__ == "__main__":
    main()
