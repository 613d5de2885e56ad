"""scripts/test-gpu: which tests it runs and where, with stand-ins for Python and virtual GPUs."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
# Says how many GPUs there are, then what it would run.
if [ "$1" = -c ]; then echo $GPUS; else echo "${TCCL_VIRTUAL_GPUS:-real}: $*"; exit $CODE; fi
"""
RUN = """#!/bin/sh
echo "virtual $1 $2"
until [ "$1" = -- ]; do shift; done
shift
if [ "$1" = tests/gpu/on-hosts ]; then shift; fi
exec "$@"
"""


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "harness").mkdir()
    executable(tmp_path / "harness" / "run", RUN)
    python = executable(tmp_path / "python", PYTHON)

    def run(*words, gpus=1, folder="harness", code=0):
        given = {"PYTHON": python}
        if folder:
            given["TCCL_VIRTUAL_GPUS"] = str(tmp_path / folder)
        return subprocess.run(
            [REPOSITORY / "scripts" / "test-gpu", *words],
            env={**os.environ, **given, "GPUS": str(gpus), "CODE": str(code)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def files_in(text):
    return [word for word in text.split() if word.endswith(".py")]


def test_the_parts_have_each_file_with_a_test_on_gpus_once(script):
    marked = [
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        if ".".join(("pytest", "mark", "gpu")) in path.read_text()
    ]
    counts = Counter(files_in(script().stdout))
    assert counts.pop("tests/gpu/test_proof_on_gpus.py") == 4  # sound, and with each fault
    assert counts == dict.fromkeys({*marked} - {"tests/gpu/test_proof_on_gpus.py"}, 1)
    assert 0 < len(files_in(script("--part", "verify").stdout)) < len(marked)


@pytest.mark.parametrize(
    ("gpus", "folder", "where"),
    [(1, "harness", "virtual"), (1, "none", "real"), (4, "", "real"), (4, "harness", "virtual")],
)
def test_virtual_gpus_are_taken_where_their_folder_is_named_or_there_is_one_real_one(
    script, gpus, folder, where
):
    done = script("--part", "hosts", "--topology", "box.xml", gpus=gpus, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith({"virtual": "virtual box.xml --\n", "real": "real: "}[where])
    assert ("real: " in done.stdout) == (where == "real")


def test_several_parts_run_in_turn(script):
    verify, path = (files_in(script("--part", part).stdout) for part in ("verify", "path"))
    assert files_in(script("--part", "path", "--part", "verify").stdout) == [*path, *verify]


def test_a_failed_part_fails_the_run_and_wrong_use_is_2(script):
    assert script(code=1).returncode == 1
    assert script("--part", "all").returncode == 2


def test_a_test_that_needs_real_gpus_is_skipped_by_name_on_virtual_ones(tmp_path):
    (tmp_path / "pynvml.py").write_text(
        "def nvmlInit(): pass\n"
        "def nvmlDeviceGetCount(): return 8\n"
        "def nvmlDeviceGetHandleByIndex(index): return index\n"
        "def nvmlDeviceGetName(handle): return 'H100'\n"
    )
    given = {"PYTHONPATH": str(tmp_path), "TCCL_VIRTUAL_GPUS": "harness"}
    words = ["-m", "pytest", "-rs", "-k", "predictions", "tests/gpu/test_size_tuning_on_gpus.py"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=REPOSITORY,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "needs real GPUs" in done.stdout
