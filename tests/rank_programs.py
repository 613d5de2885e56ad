"""Ranks that are no torch programs, to try what runs them: they answer, fail, hang, or stay.

usage: python -m tests.rank_programs SPEC.json RANK, as tccl_py.experiments.rank; what a rank does
stands in NCCL_TEST_RANKS, a word for each rank.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from tccl_py.experiments.spec import JobResult, JobSpec, batches
from tccl_py.files import decode_json, encode_json


def main():
    order = decode_json(Path(sys.argv[1]).read_text(), JobSpec, where="spec")
    rank = int(sys.argv[2])
    answers = Path(sys.argv[1]).parent
    folder = Path(os.environ.get("NCCL_TEST_PIDS", answers))
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    word = os.environ["NCCL_TEST_RANKS"].split()[rank]
    if word == "hang":
        child = subprocess.Popen(["sleep", "600"])
        (folder / f"pid-{rank}-child").write_text(str(child.pid))
        time.sleep(600)
    if word == "fail":
        print("RuntimeError: dev 2 not found")
        sys.exit(1)
    if word == "victim":
        other = os.environ["NCCL_TEST_RANKS"].split().index("fail")
        while not _has_ended(folder / f"pid-{other}"):
            time.sleep(0.05)
        time.sleep(0.5)
        print("connection closed by peer")
        sys.exit(1)
    if word == "die":
        os.abort()
    if word == "answer":
        log = Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(rank)))
        log.write_text(f"{rank}: {os.environ['NCCL_TEST_RANKS']}")
        answer = JobResult(
            rank=rank, torch="none", times=tuple(batches(row, (1.0,)) for row in order.rows)
        )
        (answers / f"result-{rank}.json").write_text(encode_json(answer))


def _has_ended(file):
    """Whether the process whose number a file has is there no more, but for its exit code."""
    if not file.exists() or not (number := file.read_text()):
        return False
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


if __name__ == "__main__":
    main()
