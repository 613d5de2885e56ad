"""Plan by rates of your own: a source is any object with `simulated` and `measure(sets)`.

python examples/own_source.py

The rates are made up: GPUs 0 and 1, and 2 and 3, are neighbours, and what leaves a GPU shares its
link. `simulated` says that nothing was measured; put False there if your rates were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import tccl_py

NEAR, FAR = 20.0, 12.0  # GB/s


class Table:
    """A source of rates by a rule."""

    simulated = True
    noise = 0.0  # of a single sample, relative; samples that vary prove no more than they repeat

    def measure(self, sets: Sequence[tccl_py.TransferSet]) -> list[tccl_py.Measurement]:
        """Answer each set, in the order given: a list of samples for each of its flows."""
        return [
            tccl_py.Measurement(
                transfers=transfers,
                samples_gbps=tuple((rate,) for rate in rates_of(transfers)),
                simulated=self.simulated,
                source="own table",
            )
            for transfers in sets
        ]


def rates_of(transfers: tccl_py.TransferSet) -> list[float]:
    """Return the rate of each flow beside the others."""
    flows_of = Counter(flow.source for flow in transfers.flows)
    rates = []
    for flow in transfers.flows:
        near = flow.source.index // 2 == flow.destination.index // 2
        rates.append((NEAR if near else FAR) / flows_of[flow.source])
    return rates


def main() -> None:
    """Plan a machine with 4 GPUs by the table."""
    model = tccl_py.load_machine("amd-v100")
    plan = tccl_py.make_plan(model.machine, model.knowledge, Table())
    print(f"rings {plan.orders}: {plan.rate_gbps:.2f} GB/s, {plan.provenance}")
    print(plan.advice)
    print(f"ring (0, 2, 1, 3): {plan.rate((0, 2, 1, 3), source=Table()):.2f} GB/s, simulated")


if __name__ == "__main__":
    main()
