"""The process groups of tccl_py.torch with the real torch: ranks meet, agree, and make groups."""

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tccl_py.nccl.settings import environment
from tccl_py.plan.directory import write_plan
from tests.planned import needing_a_graph, plan_of

# Looked for, not loaded: only the ranks need it.
pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
BOX = "amd-v100"
REPOSITORY = Path(__file__).resolve().parent.parent


def box_plan():
    return needing_a_graph(plan_of(BOX))


@pytest.fixture(scope="module")
def plan_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("machine")
    write_plan(box_plan(), directory)
    return directory


def run_job(way, plans, tmp_path):
    """What the ranks of a job printed, and their exit codes and errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = len(plans)
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "NCCL_CONF_FILE": str(tmp_path / "none"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch_rank", way, str(tmp_path), *map(str, plans)],
        cwd=REPOSITORY,
        env={**os.environ, **job},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    said = [
        tuple((tmp_path / f"{rank}.{name}").read_text() for name in ("out", "err"))
        for rank in range(size)
    ]
    return said, json.loads(done.stdout)


def test_each_group_sees_its_own_file_on_all_ranks(plan_dir, tmp_path):
    outputs, codes = run_job("as-nccl", [plan_dir] * 4, tmp_path)
    assert codes == [0] * 4, outputs
    answers = [json.loads(out) for out, _ in outputs]
    below = plan_dir / "nccl"
    for rank, answer in enumerate(answers):
        assert answer["added"] == environment(box_plan().settings)
        expected = [([0, 1, 2, 3], str(below / "graph.xml"))]
        for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [3], [1, 2, 3]):
            if rank in ranks:
                gpus = sorted(3 - one for one in ranks)
                path = below / "subsets" / f"graph-{'-'.join(map(str, gpus))}.xml"
                expected += [(ranks, str(path))] * (len(ranks) > 1)
                assert answer["sums"][",".join(map(str, ranks))] == sum(ranks)
        assert [tuple(one) for one in answer["seen"]] == expected
        assert answer["sums"]["world"] == 6


def test_a_rank_without_the_plan_leaves_all_groups_to_nccl(plan_dir, tmp_path):
    outputs, codes = run_job("as-nccl", [plan_dir, tmp_path / "gone"], tmp_path)
    assert codes == [0, 0], outputs
    for out, _ in outputs:
        answer = json.loads(out)
        assert answer["added"] == {}
        assert answer["seen"] == []
    assert f"{tmp_path / 'gone'}: is no directory; name a dir" in outputs[0][1]


def test_a_job_over_gloo_works_and_sets_nothing(plan_dir, tmp_path):
    outputs, codes = run_job("gloo", [plan_dir] * 2, tmp_path)
    assert codes == [0, 0], outputs
    for rank, (out, err) in enumerate(outputs):
        answer = json.loads(out)
        assert (answer["added"], answer["seen"]) == ({}, [])
        assert answer["sums"] == {"world": 1.0, "0,1": 1.0}, rank
        assert "tccl:" not in err
