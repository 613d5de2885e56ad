"""Judge the NCCL plugin over NCCL on GPUs, and print every complaint.

`cases [NAME...]`: each case on each release that is here. `sequences N [FIRST [VERSION]]`: N
random sequences of creations, splits, aborts and destroys. `mixtures N [FIRST [VERSION]]`: N
random mixtures of ranks: without the plugin, with other indices, on two hosts. `kills N [FIRST
[VERSION]]`: SIGKILL of random ranks while they create communicators; nothing else of this user may
use NCCL then.

Without GPUs: `mutations N`: N mutations of indices and boards, and random cost tables of the tuner,
under ASan and UBSan. `cost`: the time that the plugin adds to a communicator.
"""

import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.plugin.cases import CASES, run_case
from tests.plugin.mixtures import draw, indices
from tests.plugin.programs import StandIn, expected_answers, fuzz, stand_in_plan
from tests.plugin.ranks import boards
from tests.plugin.runs import (
    VERSIONS,
    bus_ids,
    complaints,
    differences,
    make_plan,
    plugin_library,
    releases,
    run_ranks,
)

VIRTUAL = "TCCL_VIRTUAL_GPUS" in os.environ
"""Whether one real GPU stands for all (scripts/test-gpu)."""


def main() -> None:
    """Run one kind of judgement; the exit status is 1 if anything was wrong."""
    kinds = {
        "cases": cases,
        "sequences": sequences,
        "mixtures": mixtures,
        "kills": kills,
        "mutations": mutations,
        "cost": cost,
    }
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory(prefix="plugin-") as folder:
        sys.exit(bool(kinds[sys.argv[1]](Path(folder), *sys.argv[2:])))


def cases(folder: Path, *names: str) -> int:
    """Run all cases, or those named; return the number of wrong ones."""
    bad = runs = 0
    for case in CASES:
        for version in () if case.real and VIRTUAL else _versions():
            if (names and case.name not in names) or not case.since <= version < case.until:
                continue
            start = time.monotonic()
            try:
                wrong = run_case(
                    case, folder / re.sub(r"\W", "-", f"{case.name} {version}"), version
                )
            except pytest.skip.Exception as error:
                print(f"{case.name}: skipped, {error}", flush=True)
                continue
            runs, bad = runs + 1, bad + bool(wrong)
            verdict = "\n    ".join(["wrong", *wrong[:12]]) if wrong else "ok"
            print(
                f"{version} {case.name}: {verdict} ({time.monotonic() - start:.1f} s)", flush=True
            )
    print(f"{runs} runs, {bad} wrong")
    return bad


def sequences(folder: Path, count: str, first: str = "0", *only: str) -> int:
    """Run random sequences on 4 to 8 ranks; return the number of wrong ones."""
    plan = make_plan(folder / "plan")
    bad = communicators = 0
    for seed in range(int(first), int(first) + int(count)):
        place, size = folder / f"run{seed}", random.Random(seed).randint(4, 8)
        version = only[0] if only else _versions()[seed % len(_versions())]
        options = {"version": version, "argument": seed, "timeout": 60.0}
        result = run_ranks(place, "sequence", size, plan=plan, **options)
        wrong = differences(result, plan)
        if wrong:
            # Not what default NCCL does wrong too.
            plain = run_ranks(folder / f"plain{seed}", "sequence", size, plan=None, **options)
            wrong = [line for line in wrong if line not in differences(plain, plan, default=True)]
        communicators += sum(len(made or ()) for made in result.made)
        if wrong:
            bad += 1
            print(f"seed {seed}, {size} ranks, {version}:", *wrong[:12], sep="\n    ", flush=True)
        if seed % 10 == 9:
            print(f"{seed + 1} sequences, {communicators} ranks of communicators", flush=True)
    print(f"{count} sequences, {communicators} ranks of communicators, {bad} wrong")
    return bad


def mixtures(folder: Path, count: str, first: str = "0", *only: str) -> int:
    """Run random mixtures of ranks; return the number with a communicator that failed or hung."""
    bad, plugin = 0, str(plugin_library())
    for seed in range(int(first), int(first) + int(count)):
        version = only[0] if only else _versions()[seed % len(_versions())]
        mixture, place = draw(seed, version), folder / f"run{seed}"
        made = indices(folder / f"plans{seed}", version, bus_ids())
        env = {rank: mixture.env(rank) for rank in range(len(mixture.ranks))}
        for rank, kind in enumerate(mixture.ranks):
            if kind.index:
                env[rank] |= {"NCCL_ENV_PLUGIN": plugin, "TCCL_INDEX": made[kind.index]}
        options = {"version": version, "argument": seed, "timeout": 60.0}
        result = run_ranks(place, "mixture", len(env), plan=None, rank_env=env, **options)
        wrong = result.errors + [f"exit {code}" for code in result.codes.values() if code]
        graphs: dict[str, set[str]] = {}
        for record in (record for records in result.made for record in records or ()):
            wrong += [f"{record.name}: code {record.code}"] if record.code else []
            graphs.setdefault(record.name, set()).add(record.graph)
        wrong += [f"{name}: {files}" for name, files in graphs.items() if len(files) > 1]
        bad += bool(wrong)
        if wrong:
            logs = "\n".join(path.read_text() for path in sorted(place.glob("log.*")))
            wrong += [line for line in logs.splitlines() if "WARN" in line or "tccl" in line][:40]
        files = sum(files != {""} for files in graphs.values())
        counts = f"{len(graphs)} communicators, {files} with a graph file"
        print(f"seed {seed}, {version}: {counts}", *wrong[:50], sep="\n    ", flush=True)
    print(f"{count} mixtures, {bad} wrong")
    return bad


def _versions() -> list[str]:
    return [version for version in VERSIONS if version in releases()]


def kills(folder: Path, count: str, first: str = "0", *only: str) -> int:
    """Kill random ranks at random moments, then look what the next job leaves behind."""
    plan = make_plan(folder / "plan")
    bad = died = boards_left = 0
    for seed in range(int(first), int(first) + int(count)):
        source = random.Random(seed)
        version, size = (only or _versions())[seed % len(only or _versions())], source.randint(2, 4)
        victims = source.sample(range(size), source.randint(1, size))
        # Most kills hit a board: it is there for a few milliseconds.
        boards_seen = source.randint(0, 4)
        moments = [(rank, source.uniform(0, 0.004 if boards_seen else 1.5)) for rank in victims]
        result = run_ranks(
            folder / f"run{seed}",
            "many",
            size,
            plan=plan,
            version=version,
            kills=moments,
            after_boards=boards_seen,
            timeout=10.0,
        )
        leftover = boards()
        boards_left += len(leftover)
        after = run_ranks(folder / f"after{seed}", "world", 2, plan=plan, version=version)
        wrong = differences(after, plan) + [f"left: {name}" for name in sorted(boards())]
        wrong += [
            f"rank {rank}, {made.name} {made.gpus}: {complaint}"
            for rank, records in enumerate(result.made)
            for made in records or ()
            for complaint in complaints(made, plan)
            if made.code == 0
        ]
        died += len(result.killed)
        bad += bool(wrong)
        if wrong or seed % 10 == 9:
            counts = f"{died} killed so far, {boards_left} boards left to the next jobs"
            print(f"seed {seed}, {version}: {counts}", *wrong[:12], sep="\n    ", flush=True)
    print(f"{count} jobs, {died} ranks killed, {boards_left} boards left, {bad} wrong")
    return bad


def mutations(folder: Path, count: str, seed: str = "1") -> int:
    """Mutate indices, boards and cost tables, a sixth of the number each, under ASan and UBSan."""
    for kind in ("board", "board job", "index", "index job", "tuner", "tuner wide"):
        print(f"{kind}: {fuzz(folder, kind, int(count) // 6, int(seed))}", flush=True)
    return 0


def cost(folder: Path) -> int:
    """Print the CPU time in the plugin for a communicator of eight threads, and for a choice."""
    plan, stand_in = stand_in_plan(folder / "plan"), StandIn(folder)
    script = [("comm", number + 1, list(range(8))) for number in range(1000)]
    assert stand_in.run(plan, script) == expected_answers(plan, script)
    mean, worst = (1000 * seconds for seconds in stand_in.seconds)
    print(f"{8 * len(script)} ranks of communicators: mean {mean:.3f} ms, worst {worst:.3f} ms")
    starts = []
    for _ in range(20):
        stand_in.run(plan, [("comm", 5, [0, 1])])
        starts.append(1000 * stand_in.start)
    print(f"loading an index of 247 sets: median {sorted(starts)[10]:.3f} ms, once in a process")
    choices = fuzz(folder, "tuner", 3_000_000, 1, sanitizer="")
    print(f"tuner: {choices}")
    return worst > 5


if __name__ == "__main__":
    main()
