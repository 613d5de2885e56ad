"""Judge the profiler on a machine with GPUs: skew, repeatability, speed, and what NCCL then gets.

usage: scripts/judge-profiler DIR [--quick]

Writes raw journals of all that was measured and NCCL's own rates, side by side in one run, to DIR;
`scripts/profiler-figures DIR` computes every figure from them, anywhere. Needs torch with NCCL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "profiler")]

from tccl_profiler.profiler import Options  # noqa: E402
from tccl_profiler.session import Session  # noqa: E402
from tccl_profiler.statistics import Stopping  # noqa: E402
from tccl_py.emitters.plan_files import graph_text  # noqa: E402
from tccl_py.measurements.journal import JournalledSource  # noqa: E402
from tccl_py.runtimes.nccl.settings import Settings, environment, final_channels  # noqa: E402
from tccl_py.runtimes.nccl.transport import hop_space  # noqa: E402
from tccl_py.topology.readers.live import discover_machine  # noqa: E402
from tccl_py.transfers.hops import ring_from_order, ring_set  # noqa: E402
from tccl_py.transfers.transfer import TransferSet, parse_set  # noqa: E402

CHANNELS = (1, 2, 4, 8)
SIZES = tuple(128 * 1024 << shift for shift in range(6))
ALL_REDUCE_BYTES = 512 * 1024 * 1024
AGAIN = 5
VERSION = "2.28"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few settings only")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    here = discover_machine()
    nccl = nccl_rates(here, quick=arguments.quick)
    for number in (1, 2):
        measure_all(here, arguments.folder, number, nccl, quick=arguments.quick)
    (arguments.folder / "nccl.json").write_text(json.dumps(nccl, indent=1) + "\n")
    plain = subprocess.run(
        [sys.executable, ROOT / "scripts" / "plain_copies.py", *COPIES],
        capture_output=True,
        text=True,
        check=True,
    )
    (arguments.folder / "plain-copies.json").write_text(plain.stdout)


def settings_of(quick):
    found = [
        Settings(p2p_level="LOC", channels=c, buffsize=size, algo="Ring", version=VERSION)
        for c, size in itertools.product(CHANNELS, SIZES)
    ]
    return random.Random(1).sample(found, len(found))[: 4 if quick else None]


def order_of(here):
    return here[0].gpu_indices


def ring_of(here, settings, order) -> TransferSet:
    """The set that a plan would be judged by: the ring under these settings."""
    machine, knowledge, _ = here
    space = hop_space(machine, knowledge, settings)
    return ring_set([ring_from_order(space, order)]).flows


def default_settings():
    """NCCL's own number of channels on this machine, halved because a communicator doubles it."""
    return Settings(channels=12, version=VERSION)


def nccl_rates(here, *, quick):
    """NCCL's bus bandwidth under every setting, and the set that should predict it."""
    from tests.gpu.test_nccl_loads_plans import run_ranks  # noqa: PLC0415 (needs GPUs)

    machine = here[0]
    gpus, rows = machine.gpu_indices, []
    for settings in [default_settings(), *settings_of(quick)]:
        with tempfile.TemporaryDirectory() as name:
            folder, variables = Path(name), environment(settings)
            direct = settings.p2p_level is None
            if not direct:
                graph = folder / "graph.xml"
                graph.write_text(
                    graph_text(
                        [order_of(here)] * settings.channels,
                        settings,
                        rate_gbps=30.0,
                        type_intra="PHB",
                        provenance="not measured",
                    )
                )
                variables["NCCL_GRAPH_FILE"] = str(graph)
            answers, log = run_ranks(
                gpus, variables, folder / "log", size=ALL_REDUCE_BYTES, repeats=20 if direct else 8
            )
        final = len(log.communicators[0])
        expected = final_channels(settings.channels, sm=machine.gpus[0].sm)
        rows.append(
            {
                "set": str(ring_of(here, settings, order_of(here))),
                "channels": settings.channels,
                "fifo_bytes": settings.buffsize,
                "direct": direct,
                "right": all(answer["right"] for answer in answers),
                "final_channels": final,
                "expected_channels": expected,
                "busbw_gbps": min(answer["busbw_gbps"] for answer in answers),
            }
        )
        print("nccl", rows[-1], flush=True)
    return {
        "machine": machine.name,
        "nccl": log.version,
        "all_reduce_bytes": ALL_REDUCE_BYTES,
        "environment": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
        "rows": rows,
    }


COPIES = (
    "G0->D0->C0",
    "C0->D0->G0",
    "G0->D0->C0 C0->D0->G0",
    "G0->D0->C0 G1->D1->C0",
    "C0->D0->G0 C0->D1->G1",
    "G0->D0->C0 C0->D0->G0 G1->D1->C0 C0->D1->G1",
    "G0->D0->C0 G1->D1->C0 G2->D2->C0",
    "C0->D0->G0 C0->D1->G1 C0->D2->G2",
    "G0->D0->C0 G1->D1->C0 G2->D2->C0 G3->D3->C0",
    "C0->D0->G0 C0->D1->G1 C0->D2->G2 C0->D3->G3",
    "G0->D0->C0 C0->D0->G0 G1->D1->C0 C0->D1->G1 G2->D2->C0 C0->D2->G2 G3->D3->C0 C0->D3->G3",
    "G0->D0->G1",
    "G0->D0->G1 G1->D1->G2 G2->D2->G3 G3->D3->G0",
    "G1->D1->G0 G2->D2->G0 G3->D3->G0",
)
OTHERS = (
    "G0->G0->G1",
    "G0->G1->G1",
    "G0->G0->C0",
    "C0->G0->G0",
    "G0->D0->C0->D1->G1{fifo=4M}",
    "G0->G0->C0->D1->G1{blocks=8}",
    "G0->G0->C0->G1->G1{blocks=16,fifo=512K}",
)


def measure_all(here, folder: Path, number: int, nccl, *, quick: bool) -> None:
    """Everything once with a pool of its own; its journal keeps each set AGAIN times."""
    machine, _, fingerprint = here
    begun = time.monotonic()
    options = Options(sentinel_every=0)
    with Session(machine, fingerprint, options=options) as session:
        opened_s = time.monotonic() - begun
        path = folder / f"journal-{number}.jsonl"
        with JournalledSource(session.profiler, path, session.header) as source:
            rings = [parse_set(row["set"]) for row in nccl["rows"]]
            others = [parse_set(text) for text in (*COPIES, *OTHERS)]
            wanted = (rings + others) * (1 if quick else AGAIN)
            random.Random(number).shuffle(wanted)
            for one in wanted:
                source.measure([one] * (1 + source.times_known.get(str(one), 0)))
        speed = search_speed(here, session) if number == 1 else {}
        facts = {
            "opened_s": opened_s,
            "device_bytes": session.pool.device_bytes,
            "host_bytes": session.pool.host_bytes,
            "conditions": session.conditions,
            "notices": session.notices,
            **speed,
        }
    (folder / f"facts-{number}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(number, facts, flush=True)


def search_speed(here, session) -> dict[str, float]:
    """Sets a second while the planner's search asks: every ring of the machine, as it would be."""
    machine = here[0]
    first, *rest = machine.gpu_indices
    speeds = {}
    session.profiler.options = Options(stopping=Stopping(limit=6), sentinel_every=0)
    for name, settings in {
        "direct": default_settings(),
        "bounce": Settings(p2p_level="LOC", channels=8, buffsize=512 * 1024, version=VERSION),
        "bounce, NCCL's FIFO": Settings(p2p_level="LOC", channels=8, version=VERSION),
    }.items():
        orders = [(first, *order) for order in itertools.permutations(rest)]
        sets = [ring_of(here, settings, order) for order in orders]
        begun = time.monotonic()
        session.profiler.measure(sets * 2)
        speeds[f"sets a second, {name}"] = 2 * len(sets) / (time.monotonic() - begun)
    return speeds


if __name__ == "__main__":
    main()
