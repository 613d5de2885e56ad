"""Judge the profiler on a machine with GPUs: skew, repeatability, speed, and error against NCCL.

usage: scripts/judge-profiler DIR [--quick]

Writes raw journals of all measurements, interleaved with NCCL's own rates in one run, to DIR;
`scripts/profiler-figures DIR` computes all results from the journals, on any machine. Needs torch
with NCCL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "profiler")]

from tccl_profiler.precision import Stopping  # noqa: E402
from tccl_profiler.profiler import Options  # noqa: E402
from tccl_profiler.session import Session  # noqa: E402
from tccl_py.model.rings import ring_like, ring_set  # noqa: E402
from tccl_py.model.transfer import TransferSet, parse_set  # noqa: E402
from tccl_py.nccl.communicators import parse_log  # noqa: E402
from tccl_py.nccl.settings import Settings, environment  # noqa: E402
from tccl_py.nccl.transport import hop_space  # noqa: E402
from tccl_py.nccl.view import view  # noqa: E402
from tccl_py.plan.machine_files import graph_text  # noqa: E402
from tccl_py.readers.live import discover_machine  # noqa: E402
from tccl_py.sources.bench import Bench  # noqa: E402
from tccl_py.sources.journal import JournalFile  # noqa: E402

CHANNELS = (1, 2, 4, 8)
SIZES = tuple(128 * 1024 << shift for shift in range(6))
ALL_REDUCE_BYTES = 512 * 1024 * 1024
AGAIN = 4
"""Measurements of every set, in each of two pools."""
PASSES = 3
"""Communicators of every setting in turn: a single one may have got its buffers in a slow place."""
VERSION = "2.28"
DEFAULT = Settings(channels=12, version=VERSION)
"""Default NCCL's choice where every pair has 18 NVLinks: 24 final channels."""
DIRECT_CHANNELS = (8, 16, 32)
"""Ring channels of further direct rings, from a graph file; NCCL doubles the number."""
NVLINKS_GBPS = 360.0
"""NCCL's own rate of 18 NVLinks (12 ring channels of 30), written to these graph files."""
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
FURTHER = (
    "G0->G0->G1",
    "G0->G1->G1",
    "G0->G0->C0",
    "C0->G0->G0",
    "G0->G0->C0->G1->G1{blocks=16,fifo=512K}",
    "G0->D0->C0->D1->G1{blocks=2}",
    "G0->G0->C0->D1->G1{blocks=2}",
    "G0->D0->G1 G0->G0->C0",
    "G0->D0->G1 C0->G1->G1",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="two FIFO sizes, every set once")
    arguments = parser.parse_args()
    folder, quick = arguments.folder, arguments.quick
    folder.mkdir(parents=True, exist_ok=True)
    discovered = discover_machine()
    plain = [
        sys.executable,
        ROOT / "scripts" / "plain_copies.py",
        *sets_here(discovered[0], COPIES),
    ]
    done = subprocess.run(plain, capture_output=True, text=True, check=True)
    (folder / "plain-copies.json").write_text(done.stdout)
    speed: dict[str, float] = {}
    with opened(discovered, folder, 1, speed) as (session, source):
        nccl = compared(discovered, source, folder / "nccl.json", quick=quick)
        rings = [row["set"] for row in nccl["rows"]]
        repeated(discovered, source, rings, quick=quick)
        speed |= search_speed(discovered, session)
    with opened(discovered, folder, 2, {}) as (session, source):
        repeated(discovered, source, rings, quick=quick)


@contextmanager
def opened(discovered, folder, number, more):
    """Yield a session with its own pool and a journal over it; write its facts, and `more`."""
    machine, _, fingerprint = discovered
    path, begun = folder / f"journal-{number}.jsonl", time.monotonic()
    with Session(machine, fingerprint) as session:
        opened_s = time.monotonic() - begun
        source = Bench(session.profiler, journal=JournalFile(path, session.header))
        yield session, source
        source.close()
    run_facts = {
        "opened_s": opened_s,
        "conditions": session.conditions,
        "notices": session.notices,
        **more,
    }
    write(folder / f"facts-{number}.json", run_facts)
    print(number, run_facts, flush=True)


def write(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def ring_of(discovered, settings, order) -> TransferSet:
    """Return the set behind a plan's rate: the ring under these settings."""
    machine, knowledge, _ = discovered
    space = hop_space(view(machine, knowledge, settings))
    return ring_set([ring_like(space, order)]).flows


def again(source, transfers: TransferSet) -> None:
    """Measure a set once more than its measurements in the journal."""
    source.again(transfers)


def compared(discovered, source, path, *, quick):
    """Measure NCCL's bus bandwidth under every setting; before and after, the predicting set."""
    machine = discovered[0]
    sizes = random.Random(1).sample(SIZES, len(SIZES))[: 2 if quick else None]
    rows = []
    for size in [None, *sizes]:
        settings = (
            [DEFAULT, *(Settings(channels=c, version=VERSION) for c in DIRECT_CHANNELS)]
            if size is None
            else [
                Settings(p2p_level="LOC", channels=c, buffsize=size, algo="Ring", version=VERSION)
                for c in CHANNELS
            ]
        )
        sets = [ring_of(discovered, choice, machine.gpu_indices) for choice in settings]
        for transfers in sets:
            again(source, transfers)
        answers, log = nccl_rates(machine, settings)
        for transfers in sets:
            again(source, transfers)
        for choice, transfers, answer, rings in zip(
            settings, sets, answers, log.communicators[: len(settings)], strict=True
        ):
            row = {
                "set": str(transfers),
                "channels": choice.channels,
                "fifo_bytes": choice.buffsize,
                "direct": size is None,
                "final_channels": len(rings),
                **answer,
            }
            rows.append(row)
            print("nccl", {**row, "set": "..."}, flush=True)
        # Write partial results: the machine may be taken away.
        result = {
            "machine": machine.name,
            "nccl": log.version,
            "all_reduce_bytes": ALL_REDUCE_BYTES,
            "environment": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
            "rows": rows,
        }
        write(path, result)
    return result


def nccl_rates(machine, settings):
    """Run one set of processes, with PASSES communicators for each choice of settings, in turn.

    Every choice but default NCCL's has a graph file. Returns for each choice whether all values
    were right, the median of the bus bandwidths and all of them, GB/s, and NCCL's log.
    """
    gpus = machine.gpu_indices
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graphs = [folder / f"graph-{n}.xml" if c != DEFAULT else "" for n, c in enumerate(settings)]
        for choice, graph in zip(settings, graphs, strict=True):
            orders = [gpus] * choice.channels
            rate, way = (NVLINKS_GBPS, "NVL") if choice.p2p_level is None else (30.0, "PHB")
            words = {"rate_gbps": rate, "type_intra": way, "provenance": "not measured"}
            if graph:
                graph.write_text(graph_text(orders, choice, **words))
        surroundings = {
            **os.environ,
            **environment(settings[0]),
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P,SHM,NET",
            "NCCL_DEBUG_FILE": str(folder / "log.%p"),
        }
        given = (len(gpus), folder / "ranks", ALL_REDUCE_BYTES, 8, *graphs * PASSES)
        words = [str(word) for word in given]
        ranks = [
            subprocess.Popen(
                [sys.executable, ROOT / "scripts" / "nccl_rates.py", str(rank), *words],
                env=surroundings,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(len(gpus))
        ]
        try:
            outputs = [rank.communicate(timeout=120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"NCCL failed: {[error[-2000:] for _, error in outputs]}")
        answers = [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]
        log = parse_log(
            "\n".join(path.read_text() for path in sorted(folder.glob("log.*"))), where="log"
        )
    communicators = list(zip(*answers, strict=True))
    rates = []
    for number in range(len(graphs)):
        passes = communicators[number :: len(graphs)]
        slowest = [min(answer["busbw_gbps"] for answer in ranked) for ranked in passes]
        right = all(answer["right"] for ranked in passes for answer in ranked)
        rates.append(
            {"right": right, "busbw_gbps": statistics.median(slowest), "passes_gbps": slowest}
        )
    return rates, log


def sets_here(machine, texts) -> list[str]:
    """Return the sets whose GPUs the machine has."""
    return [
        text
        for text in texts
        if {int(index) for index in re.findall("[GD]([0-9]+)", text)} <= {*machine.gpu_indices}
    ]


def repeated(discovered, source, rings, *, quick) -> None:
    """Measure every set AGAIN times, in random order."""
    sets = [parse_set(text) for text in (*rings, *sets_here(discovered[0], COPIES), *FURTHER)]
    order = sets * (1 if quick else AGAIN)
    random.Random(2).shuffle(order)
    for transfers in order:
        again(source, transfers)


def search_speed(discovered, session) -> dict[str, float]:
    """Return sets per second in a search: every ring of the machine, measured as in a plan."""
    first, *others = discovered[0].gpu_indices
    speeds = {}
    session.profiler.options = Options(stopping=Stopping(limit=6))
    for name, settings in {
        "direct": DEFAULT,
        "bounce, FIFO 512 KiB": Settings(
            p2p_level="LOC", channels=8, buffsize=512 * 1024, version=VERSION
        ),
        "bounce, FIFO 4 MiB": Settings(p2p_level="LOC", channels=8, version=VERSION),
    }.items():
        orders = [(first, *order) for order in itertools.permutations(others)]
        sets = [ring_of(discovered, settings, order) for order in orders]
        begun = time.monotonic()
        session.profiler.measure(sets)
        session.profiler.measure(sets)
        speeds[f"sets_a_second {name}"] = 2 * len(sets) / (time.monotonic() - begun)
    return speeds


if __name__ == "__main__":
    main()
