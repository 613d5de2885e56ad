"""`tccl run --record`: the job runs as it would, and its logs become a workload."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tccl_py.workloads.workload import read_workload
from tests.recorded_ranks import RankLog

JOB = """
import os, shutil, sys
place = os.path.dirname(os.environ["NCCL_DEBUG_FILE"]).replace("%%", "%")  # as NCCL does
for path in sys.argv[2:]:
    shutil.copy(path, place)
print(os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"])
sys.exit(int(sys.argv[1]))
"""
"""A job whose ranks are the logs that NCCL would write."""


@pytest.fixture
def job(tmp_path):
    """The command of a job of two ranks, without its exit code and logs; and its logs."""
    (tmp_path / "job.py").write_text(JOB)
    logs = []
    for rank in range(2):
        log = RankLog(rank, 2)
        for _ in range(5):
            log.call("AllReduce", 10)
        logs.append(tmp_path / f"{rank}.log")
        logs[-1].write_text("".join(log.lines))
    return [sys.executable, tmp_path / "job.py"], logs


def run(*words, **variables):
    clean = {name: text for name, text in os.environ.items() if not name.startswith("NCCL_")}
    return subprocess.run(
        [sys.executable, "-m", "tccl_py", "run", *map(str, words)],
        env={**clean, **variables}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_a_command_that_is_named_runs_as_it_stands_whatever_the_files_name(job, tmp_path):
    (command, logs), out = job, tmp_path / "my jobs" / "it's.json"
    out.parent.mkdir()
    done = run("--record", out, "--", *command, 0, *logs, RANK="0", WORLD_SIZE="2")
    (named,) = re.findall("`tccl (.*)`", done.stderr)
    words = [sys.executable, "-m", "tccl_py", *shlex.split(named)]
    assert subprocess.run(words, capture_output=True, check=False, timeout=60).returncode == 0
    assert read_workload(out).steps == 5


def test_a_name_that_cannot_be_a_file_is_no_fault_of_the_command(tmp_path):
    refused = run("--record", tmp_path / ("a" * 300), "--", "true")
    assert refused.returncode == 2 and "too long" in refused.stderr
    assert "command" not in refused.stderr


def test_a_job_is_recorded_whatever_the_length_of_the_files_name(job, tmp_path):
    (command, logs), out = job, tmp_path / f"{'n' * 230}.json"
    assert run("--record", out, "--", *command, 0, *logs).returncode == 0
    assert read_workload(out).name == "n" * 200


def test_signals_reach_a_recorded_job(tmp_path):
    words = ["-m", "tccl_py", "run", "--record", tmp_path / "it.json", "--", "sh", "-c"]
    script = f"trap 'exit 9' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    with subprocess.Popen([sys.executable, *map(str, words), script]) as process:
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 9


STOPPED_AT_ITS_START = """
import os, signal, subprocess, sys, time
from pathlib import Path
from tccl_py.workloads import record

class Started(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        while not Path(sys.argv[1]).exists():
            time.sleep(0.01)
        for name in ("SIGINT", sys.argv[2]):
            os.kill(os.getpid(), signal.Signals[name])

subprocess.Popen = Started
script = f"trap 'exit 9' TERM USR1; touch {sys.argv[1]}; while :; do sleep 0.1; done"
sys.exit(record.run_job(["sh", "-c", script], os.environ))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_that_comes_while_a_recorded_job_starts_reaches_it(name, tmp_path):
    words = [sys.executable, "-c", STOPPED_AT_ITS_START, tmp_path / "ready", name]
    assert subprocess.run(words, check=False, timeout=60).returncode == 9


def test_a_signal_that_is_ignored_is_ignored_by_the_recorded_job_as_well(tmp_path):
    script = "kill -HUP $$; kill -INT $$; exit 3"
    words = [sys.executable, "-m", "tccl_py", "run", "--record", tmp_path / "it.json", "--"]
    command = shlex.join([*map(str, words), "sh", "-c", script])
    ignoring = ["sh", "-c", f"trap '' HUP INT; exec {command}"]
    assert subprocess.run(ignoring, check=False, timeout=60).returncode == 3
