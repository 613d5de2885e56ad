"""Measure your own transfer sets through a session.

python examples/measure_own_sets.py

On the host backend, two processes on two cores copy through host memory in place of GPUs: the rates
say nothing about GPUs. For GPUs, see the comment in `main`.
"""

from __future__ import annotations

import tccl_py
from tccl_profiler.host.machine import host_fingerprint, host_machine
from tccl_profiler.profiler import Options
from tccl_profiler.session import Session
from tccl_profiler.statistics import Stopping, median_interval

SETS = [
    "G0->G0->C0->G1->G1",  # one bounce through NUMA node 0
    "G0->G0->C0->G1->G1 G1->G1->C0->G0->G0",  # a ring of two GPUs
]


def main() -> None:
    """Measure the sets and print rates with their intervals."""
    # On GPUs: machine, knowledge, fingerprint = tccl_py.discover_machine(), and backend="cuda".
    machine = host_machine(2)
    # Few repeats and a wide target save time; the defaults are 30 and 0.01.
    options = Options(stopping=Stopping(target=0.1, minimum=6, limit=8))
    with Session(machine, host_fingerprint(machine), backend="host", options=options) as session:
        measurements = session.profiler.measure([tccl_py.parse_set(one) for one in SETS])
    for measurement in measurements:
        print(f"{measurement.transfers} ({measurement.source})")
        for row, gbps in zip(measurement.samples_gbps, measurement.gbps, strict=True):
            interval = median_interval(row)
            print(f"    {gbps:.2f} GB/s, 95 % interval {interval.low:.2f} to {interval.high:.2f}")
        print(f"    overlap {measurement.overlap:.0%}, skew {measurement.skew_us:.0f} us")
    for notice in session.notices:
        print(f"note: {notice}")


if __name__ == "__main__":
    main()
