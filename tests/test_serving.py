"""The variables of a plan in a container of a server, whose workers are spawned processes."""

import subprocess
import sys

import pytest

from tccl_py.plan.directory import write_plan
from tests.planned import ASUS, plan_of

SERVER = """
import multiprocessing, os

def worker(queue):
    queue.put({name: text for name, text in os.environ.items() if name[:5] in ("NCCL_", "TCCL_")})

if __name__ == "__main__":
    spawned = multiprocessing.get_context("spawn")
    queue = spawned.Queue()
    ranks = [spawned.Process(target=worker, args=(queue,)) for _ in range(2)]
    [rank.start() for rank in ranks]
    print([queue.get() for _ in ranks])
    [rank.join() for rank in ranks]
"""


@pytest.mark.parametrize(
    ("choice", "variables"),
    [
        ("default", {}),
        ("variables", {"NCCL_P2P_LEVEL": "SYS", "NCCL_MIN_NCHANNELS": "4"}),
        ("graph", {"NCCL_P2P_LEVEL": "SYS", "NCCL_GRAPH_FILE": "nccl/graph.xml"}),
    ],
)
def test_a_file_of_variables_for_docker_reaches_each_worker_of_a_server(
    choice, variables, tmp_path
):
    place = tmp_path / "plan"
    place.mkdir()
    write_plan(plan_of(ASUS), place)
    run = [sys.executable, "-m", "tccl_py", "run", str(place), "--choice", choice]
    run += ["--gpus", "0-7", "--", "env"]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    lines = [line for line in printed.splitlines() if line.startswith(("NCCL_", "TCCL_"))]
    # As docker's --env-file: each line up to its end, without a shell.
    given = dict(line.split("=", 1) for line in lines)
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    asked = subprocess.run(
        [sys.executable, server], env=given, capture_output=True, text=True, check=True
    )
    if "NCCL_GRAPH_FILE" in variables:
        variables = {**variables, "NCCL_GRAPH_FILE": str(place / variables["NCCL_GRAPH_FILE"])}
    assert eval(asked.stdout) == [variables, variables]
