"""NCCL 2.30.7's own graph code, as a program that answers cases; see ../shared/nccl-host."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.nccl_host import patience

Case = tuple[Mapping[str, str], Sequence[tuple[str, Sequence[int], str | None]]]
_TRIES = 3
ORACLE = Path(__file__).parents[2] / "shared" / "nccl-host" / "graph-oracle"


def _starts() -> bool:
    if not ORACLE.exists():
        return False
    done = subprocess.run([ORACLE], check=False, input=b"", capture_output=True, env=_environment())
    return done.returncode == 0


def _environment(preload: str = "") -> dict[str, str]:
    return {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": preload}


needs_judge = pytest.mark.skipif(
    not _starts(), reason="needs ../shared/nccl-host/graph-oracle and libasan 8"
)


def judged(cases: Sequence[Case]) -> list[dict]:
    """Return NCCL's answer to every case, in order.

    A case is its environment and, for each node, the text of the topology (or the path of a file),
    the GPUs in rank order, and the graph file's path (None: NCCL searches). ORACLE_DISCOVER=1 in
    the environment orders devices as without NCCL_TOPO_FILE, ORACLE_PLAIN=1 as the file does.
    What takes the judge too long on busy cores is asked again, alone.
    """
    answers = _asked(cases)
    for _ in range(_TRIES):
        late = [number for number, one in enumerate(answers) if one.get("timeout")]
        for number in late:
            answers[number] = _asked([cases[number]])[0]
    return answers


def _asked(cases: Sequence[Case]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[str, str] = {}
        lines = []
        for number, (variables, nodes) in enumerate(cases):
            fields = []
            for text, gpus, graph in nodes:
                if text not in paths:
                    paths[text] = text
                    if "<" in text:
                        paths[text] = f"{folder}/{len(paths)}.xml"
                        Path(paths[text]).write_text(text)
                fields.append(f"{paths[text]}|{','.join(map(str, gpus))}|{graph or '-'}")
            settings = ";".join(f"{name}={value}" for name, value in variables.items())
            lines.append("\t".join(["S", str(number), settings, *fields]))
        # ASan's runtime comes first, and checks what the other then clears.
        preload = f"libasan.so.8:{patience()}" if shutil.which("cc") else ""
        done = subprocess.run(
            [ORACLE], input="\n".join(lines) + "\n", capture_output=True, text=True,
            check=True, env=_environment(preload),
        )  # fmt: skip
    answers = dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
    return [json.loads(answers[str(number)]) for number in range(len(cases))]
