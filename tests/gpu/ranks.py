"""Ranks of a job: started together, and all ended together."""

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_ranks(commands, environments, *, timeout):
    """Run a process for each command; return their exit codes, and their output and errors.

    None outlives the call, which ends with subprocess.TimeoutExpired where a rank hangs.
    """
    ranks = [
        subprocess.Popen(
            list(map(str, command)),
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], outputs
