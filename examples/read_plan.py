"""Read a plan in Python: rings, slowest hops, bound, default NCCL and subsets.

python read_plan.py DIR     (a directory of `tccl plan`, or a plan.json; without it, a bundled
machine is planned by simulation)
"""

from __future__ import annotations

import sys
from pathlib import Path

import tccl_py


def main(path: Path | None) -> None:
    """Print the main parts of a plan."""
    if path is not None:
        plan = tccl_py.load_plan(path)
    else:
        model = tccl_py.load_machine("amd-v100")
        plan = tccl_py.make_plan(model.machine, model.knowledge, tccl_py.Simulator(model))

    # Pass on every rate with its provenance.
    print(f"{plan.machine.name}, GPUs {plan.gpus}: {plan.provenance}")

    # A ring is a closed sequence of hops; its rate is that of its slowest hop.
    for number, ring in enumerate(plan.rings):
        print(f"ring {number}: {ring.gpus} at {ring.rate_gbps:.2f} GB/s")
        for hop in ring.hops:
            mark = "  <- slowest" if hop is ring.bottleneck else ""
            print(f"    G{hop.source} to G{hop.target} {hop.rate_gbps:6.2f} GB/s  {hop.flow}{mark}")

    # The plan's rate is for all rings together, and predicts NCCL's bus bandwidth.
    bound = "none known" if plan.bound_gbps is None else f"{plan.bound_gbps:.2f} GB/s"
    print(f"rate {plan.rate_gbps:.2f} GB/s, bound {bound}, proven {plan.proven}")

    # Three ways to run NCCL, and what jobs get by each.
    for name, choice in plan.choices.items():
        gain = plan.gain(name)
        times = "not rated" if gain is None else f"{gain:.2f}x default NCCL"
        print(f"{name}: {times}, {choice.environment or 'no variables'} {choice.note}".rstrip())

    # A communicator needs rings over exactly its GPUs.
    pair = plan.gpus[:2]
    subset = plan.subset(pair)
    print(f"GPUs {pair}: {f'{subset.rate_gbps:.2f} GB/s' if subset else 'no rings planned'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
