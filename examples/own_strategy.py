"""A search of your own behind the strategy interface: 2-opt, which turns parts of a ring around.

python examples/own_strategy.py [MACHINE]     (a bundled name or a file)

A strategy is a function that is given a `Run`. It measures rings with `run.offer_orders` and finds
the best so far in `run.incumbent`. `find_rings` takes care of the rest: budget, Ctrl-C, counting.
"""

from __future__ import annotations

import sys
from itertools import combinations

import tccl_py
from tccl_py.model.symmetry import automorphisms
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.transport import hop_space
from tccl_py.search.problem import Budget, SearchProblem, SearchResult
from tccl_py.search.strategies import Run


def two_opt(run: Run) -> None:
    """Turn each part of the ring around; keep what is faster, until nothing is."""
    # Every second GPU first: a poor order, so that there is something to improve.
    order = (*run.problem.gpus[::2], *run.problem.gpus[1::2])
    # A list of ring sets: this one is a set of one ring.
    run.offer_orders([(order,)])
    improved = True
    while improved:
        improved = False
        for i, j in combinations(range(1, len(order) + 1), 2):
            turned = (*order[:i], *reversed(order[i:j]), *order[j:])
            before = run.incumbent.score
            run.offer_orders([(turned,)])
            if run.incumbent.score > before:
                order, improved = turned, True
    # It knows no upper bound: what it leaves in `run.bounds` stays empty, so nothing is "proven".


def main(name: str) -> None:
    """Let 2-opt and the built-in search solve the same problem."""
    model = tccl_py.load_machine(name)
    # The hops that NCCL takes under one choice of settings.
    settings = Settings(p2p_level="SYS", channels=1)
    problem = SearchProblem(
        spaces={1: hop_space(model.machine, model.knowledge, settings)},
        source=tccl_py.Simulator(model),
        symmetry=automorphisms(model.machine, model.knowledge),
        budget=Budget(sets=500),
    )
    results: list[SearchResult] = [
        tccl_py.find_rings(problem, strategy=two_opt),
        tccl_py.find_rings(problem, strategy="best-first"),
    ]
    for result in results:
        bound = "no bound" if result.bound_gbps is None else f"bound {result.bound_gbps:.2f}"
        mark = "simulated from assumed figures" if result.assumed else "simulated"
        print(
            f"{result.strategy}: {result.rings.rings[0].gpus} at {result.rate_gbps:.2f} GB/s "
            f"({mark}), {bound}, {result.sets_measured} sets"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "asus-esc8000a-e13p")
