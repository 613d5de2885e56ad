"""Measure transfer sets of your own.

python examples/measure_own_sets.py

This uses the host backend: two processes on two cores copy through host memory in the GPUs' place,
so the rates say nothing about GPUs. Leave `backend` and `devices` out to measure this host's GPUs.
"""

from __future__ import annotations

import tccl_py
from tccl_py.sources.profiled import MeasurementOptions, relative_intervals

SETS = [
    "G0->G0->C0->G1->G1",  # one bounce through NUMA node 0
    "G0->G0->C0->G1->G1 G1->G1->C0->G0->G0",  # two that meet: a ring of two
]


def main() -> None:
    """Measure the sets and print rates with their intervals."""
    # Few repeats and a wide target, so that this ends soon; the defaults are 30 and 0.01.
    options = MeasurementOptions(target=0.1, repeats=8)
    with tccl_py.open_source(backend="host", devices=2, options=options) as source:
        measurements = source.measure([tccl_py.parse_set(text) for text in SETS])
    for measurement in measurements:
        print(f"{measurement.transfers} ({measurement.source})")
        for gbps, width in zip(measurement.gbps, relative_intervals(measurement), strict=True):
            print(f"    {gbps:.2f} GB/s, 95 % interval {width:.0%} wide")
        print(f"    overlap {measurement.overlap:.0%}, skew {measurement.skew_us:.0f} us")
    for notice in source.notices:
        print(f"note: {notice}")


if __name__ == "__main__":
    main()
