"""C programs over the plugin that need no NCCL: the stand-in for NCCL, and the fuzzer.

Both are compiled with and without sanitizers. What NCCL asks was recorded from its own host code
(tests/plugin/recorder.c) into tests/cases/plugin.
"""

import functools
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tccl_py.nccl.plugin.build import SOURCES, build_plugin
from tests.plugin.runs import make_plan, random_tables
from tests.skips import needs

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "cases" / "plugin"
GPUS = 8
SANITIZERS = {
    "": (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"),
    "thread": ("-fsanitize=thread", "-g"),
}


@functools.cache
def compile_program(folder, name, *arguments, sanitizer="", target=None):
    """Return a program or library of a C file beside this module; skip without a compiler."""
    needs("a C compiler")
    path = folder / (target or f"{name}{sanitizer}")
    command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-pthread", *SANITIZERS[sanitizer]]
    command += ["-o", str(path), str(HERE / f"{name}.c"), *map(str, arguments), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        if sanitizer and "cannot find" in error.stderr:
            pytest.skip(f"the compiler has no {sanitizer} sanitizer")
        raise AssertionError(error.stderr) from error
    return path


class StandIn:
    """A stand-in for NCCL with the plugin, made with a sanitizer or "" for none."""

    def __init__(self, folder, sanitizer=""):
        self._program = compile_program(folder, "stand_in", sanitizer=sanitizer)
        self.libraries = [
            compile_program(
                folder,
                "fake_gpu",
                "-shared",
                "-fPIC",
                f"-Wl,-soname,{name}.so.1",
                target=f"{name}.so",
            )
            for name in ("libcuda", "libnvidia-ml")
        ]
        flags = SANITIZERS[sanitizer]
        self.plugin = build_plugin(folder, flags=flags, name=f"plugin{sanitizer}.so")

    def run(
        self, plan, script, *, version="2.30.7", release="2.30.7", record=None, wrapper=(), **env
    ):
        """Play communicators, (kind, hash, ranks) each; return (hash, rank) -> (size, FNV).

        `nodes` has the preferred NUMA node of each, `buffers` its NCCL_BUFFSIZE or "-", and `said`
        the text on stderr. `wrapper` is the start of the command, `release` what the plugin is told
        of NCCL, `record` what NCCL asks.
        """
        lines = "".join(f"{kind} {name:x} {','.join(map(str, r))}\n" for kind, name, r in script)
        record = record or RECORDS / f"asked-by-{version}.txt"
        command = [*wrapper, self._program, self.plugin, record, *self.libraries, release]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "TCCL_"))}
        done = subprocess.run(
            command,
            input=lines,
            env=environ | {"TCCL_INDEX": str(plan.index)} | env,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-300:] + done.stderr[:3000]
        self.said = done.stderr
        *answers, seconds = done.stdout.splitlines()
        self.start, *self.seconds = map(float, seconds.split()[1:])
        parts = [line.split() for line in answers]
        self.buffers = {(int(p[0], 16), int(p[1])): p[4] for p in parts}
        self.nodes = {(int(p[0], 16), int(p[1])): int(p[6]) for p in parts}
        return {(int(p[0], 16), int(p[1])): (int(p[2]), int(p[3], 16)) for p in parts}


def stand_in_plan(folder, *, gpus=GPUS, **fields):
    """Make a plan of the stand-in's GPUs."""
    buses = {gpu: f"0000:{16 + gpu:02x}:00.0" for gpu in range(gpus)}
    return make_plan(folder, buses=buses, **fields)


def random_script(seed, count):
    """Return random communicators, one line each: made, failed, not seen through, and shared."""
    source = random.Random(seed)
    kinds = ["comm"] * 8 + ["lacks", "blind", "failed", "shared", "late"]
    return [
        (source.choice(kinds), number + 256, source.sample(range(GPUS), source.randint(1, GPUS)))
        for number in range(count)
    ]


def expected_answers(plan, script):
    """Return what each rank of a script must get, as `StandIn.run` returns it."""
    found = {}
    for kind, name, ranks in script:
        for rank in ranks:
            if kind == "failed":
                continue
            whole = kind in ("comm", "late") and tuple(sorted(ranks)) in plan.orders
            found[name, rank] = file_answer(plan, ranks) if whole else (0, 0)
    return found


def file_answer(plan, ranks):
    """Return size and FNV-1a of the graph file of a set."""
    data, fnv = (plan.folder / plan.file(ranks)).read_bytes(), 0xCBF29CE484222325
    for byte in data:
        fnv = (fnv ^ byte) * 0x100000001B3 % (1 << 64)
    return len(data), fnv


def fuzz(folder, kind, count, seed, *, sanitizer="address"):
    """Run the fuzzer, under ASan and UBSan; return its last line.

    "index job" and "board job" are of a job over several hosts, "tuner wide" is of nine GPUs.
    """
    sources = sorted(SOURCES.glob("*.c"))
    program = compile_program(folder, "fuzz", f"-I{SOURCES}", *sources, sanitizer=sanitizer)
    kind, _, job = kind.partition(" ")
    plan = folder / f"plan{seed}{job}"
    if job:
        shutil.rmtree(plan, ignore_errors=True)
        wide = {"gpus": 9, "sizes": (9,), "tables": random_tables(seed, 9)[-1:]}
        stand_in_plan(plan, **(wide if job == "wide" else {"gpus": 2, "job": 6}))
    elif not plan.exists():
        rules = {"must": {"NCCL_P2P_LEVEL": "SYS"}, "forbid": ("NCCL_CROSS_NIC", "NCCL_X")}
        nodes = {gpu: gpu % 2 for gpu in range(4)}
        tables = random_tables(seed, 4)
        stand_in_plan(
            plan, gpus=4, driver=580, numa=2, nccl="2.28", tables=tables, nodes=nodes, **rules
        )
    done = subprocess.run(
        [program, kind, plan, str(count), str(seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[:3000]
    return done.stdout.splitlines()[-1]
