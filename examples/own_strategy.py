"""Your own search behind the strategy interface: 2-opt, which reverses parts of a ring.

python examples/own_strategy.py [MACHINE]     (a bundled name or a file)

A strategy is a function of a `Run`. `run.offer_known` measures rings, `run.incumbent` is the best
ring set so far, and `find_rings` handles budget, Ctrl-C and counting.
"""

from __future__ import annotations

import sys
from itertools import combinations

import tccl_py


def two_opt(run: tccl_py.Run) -> None:
    """Reverse each part of the ring; keep faster rings, until no reversal helps."""
    # From half to half in turn: a poor order, with room for improvement.
    gpus = run.problem.gpus
    halves = zip(gpus, gpus[len(gpus) // 2 :], strict=False)
    order = tuple(gpu for pair in halves for gpu in pair)
    # The argument is a list of ring sets, here one set of one ring.
    run.offer_known([(order,)])
    improved = True
    while improved:
        improved = False
        for i, j in combinations(range(1, len(order) + 1), 2):
            turned = (*order[:i], *reversed(order[i:j]), *order[j:])
            before = run.incumbent.score
            run.offer_known([(turned,)])
            if run.incumbent.score > before:
                order, improved = turned, True
    # 2-opt knows no upper bound: `run.bounds` stays empty, so no result is "proven".


def main(name: str) -> None:
    """Solve the same problem by 2-opt and by the built-in search, then plan by 2-opt."""
    model = tccl_py.load_machine(name)
    source = tccl_py.Simulator(model)
    # The hops that NCCL takes under one choice of settings.
    problem = tccl_py.search_problem(
        model.machine,
        model.knowledge,
        source,
        tccl_py.Settings(p2p_level="SYS", channels=4),
        budget=tccl_py.Budget(sets=500),
    )
    for strategy in (two_opt, "best-first"):
        result = tccl_py.find_rings(problem, strategy=strategy)
        bound = "no bound" if result.bound_gbps is None else f"bound {result.bound_gbps:.2f}"
        mark = "simulated from assumed values" if result.assumed else "simulated"
        print(
            f"{result.strategy}: {result.rings.rings[0].gpus} at {result.rate_gbps:.2f} GB/s "
            f"({mark}), {bound}, {result.sets_measured} sets"
        )
    # A whole plan searches all settings.
    plan = tccl_py.make_plan(model.machine, model.knowledge, source, strategy=two_opt)
    print(f"plan by {plan.strategy}: {plan.rate_gbps:.2f} GB/s, {plan.provenance}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "asus-esc8000a-e13p")
