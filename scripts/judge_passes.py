"""Times of the passes of NCCL's kernel, compared with the measuring kernel's.

usage: scripts/judge-passes FILE [--quick]

A ring's collectives consist of five passes: send (S), receive (R), receive, add and send (A), A
with a kept copy (B), receive, keep and send (C). Over two GPUs a broadcast is S and R, a
reduce-scatter S and a receive with an add, an all-gather S and R, an all-reduce S, B and R; more
GPUs add A and C. Each collective is timed with all hops bounced, and with default NCCL's direct
hops, over the same rings, channels and FIFOs, in the same run as the sets for broadcast and
all-reduce.

Prints a row for each choice and writes the rows to FILE. Needs torch with NCCL.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from judge_profiler import DEFAULT, VERSION, again, nccl_rates, opened, ring_of, write
from nccl_rates import KINDS

from tccl_py.model.transfer import TransferSet, parse_set
from tccl_py.nccl.settings import Settings
from tccl_py.readers.live import discover_machine

CHANNELS = (1, 2)
SIZES = (256 << 10, 512 << 10, 4 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true", help="one channel, FIFOs of 4 MiB")
    arguments = parser.parse_args()
    discovered = discover_machine()
    machine = discovered[0]
    bounced = [(1, SIZES[-1])] if arguments.quick else itertools.product(CHANNELS, SIZES)
    choices = [
        DEFAULT,
        *(
            Settings(
                p2p_level="LOC", channels=channels, buffsize=size, algo="Ring", version=VERSION
            )
            for channels, size in bounced
        ),
    ]
    rows = []
    folder = arguments.file.with_suffix(".journal")
    folder.mkdir(parents=True, exist_ok=True)
    with opened(discovered, folder, 1) as (_, source):
        for settings in choices:
            ring = ring_of(discovered, settings, machine.gpu_indices)
            sets = {"all_reduce": ring, "broadcast": without_last(ring)}
            for transfers in sets.values():
                again(source, transfers)
            answers, _ = nccl_rates(machine, [settings] * len(KINDS), kinds=KINDS)
            measured = {name: source.measure([transfers])[0] for name, transfers in sets.items()}
            row = {
                "gpus": len(machine.gpus),
                "direct": settings is DEFAULT,
                "channels": settings.channels,
                "fifo_bytes": settings.buffsize,
                "nccl": {
                    kind: answer["busbw_gbps"] for kind, answer in zip(KINDS, answers, strict=True)
                },
                "right": all(answer["right"] for answer in answers),
                "sets": {name: min(measurement.gbps) for name, measurement in measured.items()},
            }
            rows.append(row)
            print(row, flush=True)
            write(arguments.file, rows)


def without_last(ring: TransferSet) -> TransferSet:
    """Return the chain of a broadcast from GPU 0."""
    return parse_set(" ".join(str(flow) for flow in ring.flows if str(flow.destination) != "G0"))


if __name__ == "__main__":
    main()
