"""Rate rings and settings of your own, beside those of a plan.

python examples/rate_rings.py [MACHINE]     (a bundled name or a file)
"""

from __future__ import annotations

import sys

import msgspec

import tccl_py


def main(name: str) -> None:
    """Plan, then rate the plan's rings, other rings, and other settings."""
    model = tccl_py.load_machine(name)
    source = tccl_py.open_source(model)
    plan = tccl_py.make_plan(model.machine, model.knowledge, source)
    mark = plan.provenance
    print(f"the plan's {len(plan.orders)} rings: {plan.rate_gbps:.2f} GB/s ({mark})")

    # Any set of rings, all of them together: here one that all channels take.
    ascending = plan.gpus
    print(f"one ring {ascending}: {plan.rate(ascending, source=source):.2f} GB/s ({mark})")

    # The order decides: here GPUs of one switch write to two others at the same time.
    half = len(ascending) // 2
    in_turn = tuple(gpu for pair in zip(ascending, ascending[half:], strict=False) for gpu in pair)
    print(f"one ring {in_turn}: {plan.rate(in_turn, source=source):.2f} GB/s ({mark})")

    # Another order in the place of the plan's first ring; the other rings stay.
    print(f"the first ring so: {plan.what_if(in_turn, source):.2f} GB/s ({mark})")

    # Other settings: the plan's with smaller FIFOs, and default NCCL's with its own rings.
    small = msgspec.structs.replace(plan.settings, buffsize=1 << 20)
    print(f"FIFOs of 1 MiB: {plan.rate(plan.orders, small, source=source):.2f} GB/s ({mark})")
    default = plan.choices["default"]
    rate = plan.rate(default.rings, default.settings, source=source)
    print(f"default NCCL: {rate:.2f} GB/s ({mark})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "asus-esc8000a-e13p")
