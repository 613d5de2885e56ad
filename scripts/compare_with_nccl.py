"""Compare the emulation of NCCL's graph search with NCCL's own graph code on random machines.

Prints the number of machines that agree, and for each class of disagreement some seeds.
"""

import argparse
import collections
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.graph_judge import ORACLE, judged
from tests.nccl_defaults import NET_PAIRS, Case, difference, ours, random_case, theirs

BATCH = 50
REFUSED, CUT = "NCCL refuses the machine", "NCCL cuts the node in parts"
APART = (REFUSED, CUT, NET_PAIRS)
"""Classes outside the emulation."""


def compared(case: Case, answer: Mapping[str, Any]) -> tuple[str, float]:
    """Return the class of disagreement ("same" for none) and the seconds of the emulation."""
    if answer.get("rc") != 0:
        return REFUSED, 0.0
    begun = time.process_time()
    found = ours(case)
    took_s = time.process_time() - begun
    if answer["nNodes"] != case.nodes:
        return CUT, took_s
    return difference(found, theirs(case, answer)) or "same", took_s


def main() -> None:
    """Run the comparison; exit 1 if less than 99 of 100 comparable machines agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machines", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first machine")
    parser.add_argument("--slow-s", type=float, default=2.0, help="name machines that take longer")
    options = parser.parse_args()
    if not ORACLE.exists():
        sys.exit(f"compare-with-nccl: {ORACLE} is missing")
    classes: dict[str, list[int]] = collections.defaultdict(list)
    slow = []
    for first in range(options.seed, options.seed + options.machines, BATCH):
        last = min(first + BATCH, options.seed + options.machines)
        seeds = range(first, last)
        cases = [random_case(random.Random(seed)) for seed in seeds]
        answers = judged([case.question() for case in cases])
        for seed, case, answer in zip(seeds, cases, answers, strict=True):
            name, took_s = compared(case, answer)
            classes[name].append(seed)
            if took_s > options.slow_s:
                slow.append(f"{seed} ({len(case.gpus)} GPUs, {took_s:.1f} s)")
    for name, seeds in sorted(classes.items(), key=lambda item: -len(item[1])):
        some = "" if name == "same" else f"   seeds {' '.join(map(str, seeds[:10]))}"
        print(f"{len(seeds):6}  {name}{some}")
    print(f"{len(slow):6}  took longer than {options.slow_s:g} s   {', '.join(slow[:10])}")
    comparable = sum(len(seeds) for name, seeds in classes.items() if name not in APART)
    sys.exit(len(classes["same"]) < 0.99 * comparable)


if __name__ == "__main__":
    main()
