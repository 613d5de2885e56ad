"""Files written by `tccl plan` are loaded by real NCCL, and its rings are the plan's.

Needs two GPUs or more and torch with NCCL. NCCL_NVLS_ENABLE is taken from the environment as it is.
"""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from tccl_py.model.machine import Knowledge
from tccl_py.model.rings import neighbours
from tccl_py.nccl.communicators import parse_log, same_rings, transport_of
from tccl_py.nccl.paths import path_types
from tccl_py.nccl.settings import Settings, environment
from tccl_py.nccl.system import PathType
from tccl_py.nccl.transport import final_channels, pair_mechanism
from tccl_py.nccl.validator import validate
from tccl_py.nccl.view import view
from tccl_py.plan.load import load_plan
from tccl_py.plan.machine_files import graph_text
from tccl_py.readers.live import discover_machine
from tccl_py.readers.nccl_topology import read_nccl_topology
from tests.gpu.ranks import REAL, REPOSITORY, run_ranks

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(300)]
SIZE = (64 if REAL else 4) << 20


def tccl(*words):
    command = [sys.executable, "-m", "tccl_py.cli.main", *map(str, words)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def all_reduce(gpus, variables, log, *, size=SIZE, repeats=20):
    """All-reduce over these GPUs; gives the ranks' answers and NCCL's parsed log."""
    surroundings = {
        **os.environ,
        **variables,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P,SHM,NET",
        "NCCL_DEBUG_FILE": f"{log}.%p",
    }
    words = [sys.executable, "-m", "tests.gpu.collective"]
    meet = log.with_name(f"meet-{log.name}")
    commands = [[*words, rank, len(gpus), meet, size, repeats] for rank in range(len(gpus))]
    codes, outputs = run_ranks(commands, [surroundings] * len(gpus))
    assert codes == [0] * len(gpus), outputs
    answers = [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]
    text = "\n".join(path.read_text() for path in sorted(log.parent.glob(f"{log.name}.*")))
    return answers, parse_log(text, where=str(log))


def in_ranks(rings, gpus):
    """GPU orders as rank orders of a communicator over these GPUs."""
    rank = {gpu: number for number, gpu in enumerate(gpus)}
    return [tuple(rank[gpu] for gpu in ring) for ring in rings]


def assert_loaded(log, rings, gpus):
    (found,) = log.communicators
    expected = in_ranks(rings, gpus) * 2
    assert len(found) == len(expected)
    assert all(map(same_rings, found, expected))


def test_the_discovered_machine_is_the_one_that_nccl_sees(tmp_path):
    machine, knowledge, fingerprint = discover_machine()
    dump = tmp_path / "nccl-topology.xml"
    all_reduce(machine.gpu_indices, {"NCCL_TOPO_DUMP_FILE": str(dump)}, tmp_path / "log")
    theirs = read_nccl_topology(dump)
    assert [(g.index, g.bus_id, g.sm) for g in machine.gpus] == [
        (g.index, g.bus_id, g.sm) for g in theirs.gpus
    ]
    for one in machine.gpu_indices:
        for other in machine.gpu_indices:
            ours = path_types(machine)[f"G{one}", f"G{other}"]
            assert ours == path_types(theirs)[f"G{one}", f"G{other}"]
            if ours == PathType.NVL:
                assert knowledge.can_access(machine, one, other)
    links = {link.source: link.count for link in machine.nvlinks}
    assert links == {link.source: link.count for link in theirs.nvlinks}
    assert len(set(fingerprint.gpu_uuids)) == len(machine.gpus)
    print("discovered:", msgspec.json.encode(fingerprint).decode())


def test_nccl_runs_the_rings_of_the_plan(simulated, tmp_path):
    plan = load_plan(simulated)
    answer = tccl("env", simulated, "--choice", "graph", "--json")
    variables = json.loads(answer.stdout)["environment"]
    answers, log = all_reduce(plan.gpus, variables, tmp_path / "log")
    assert all(answer["right"] for answer in answers)
    assert_loaded(log, plan.channel_rings, plan.gpus)
    if REAL:
        stock, _ = all_reduce(plan.gpus, {}, tmp_path / "stock")
        print("plan", answers[0]["busbw_gbps"], "stock", stock[0]["busbw_gbps"], "GB/s at 64 MiB")


def test_nccl_runs_the_rings_of_a_subset(simulated, tmp_path):
    plan = load_plan(simulated)
    sizes = (2, len(plan.gpus) - 1)
    subsets = [one for one in plan.subsets if one.rings and len(one.gpus) in sizes]
    for subset in (subsets[:1] + subsets[-1:]) if subsets else []:
        text = ",".join(map(str, subset.gpus))
        answer = tccl("env", simulated, "--choice", "graph", "--gpus", text, "--json")
        variables = json.loads(answer.stdout)["environment"]
        answers, log = all_reduce(subset.gpus, variables, tmp_path / f"log-{text}")
        assert all(one["right"] for one in answers)
        rings = [subset.rings[i % len(subset.rings)] for i in range(plan.settings.channels)]
        assert_loaded(log, rings, subset.gpus)


@pytest.mark.gpu(count=4)
@pytest.mark.parametrize("level", [None, "LOC"])
def test_nccl_runs_two_rings_that_are_not_its_own(level, tmp_path):
    machine, knowledge, _ = discover_machine()
    gpus = machine.gpu_indices[:4]
    a, b, c, d = gpus
    rings = [(a, c, b, d), (a, d, c, b)] * 4
    settings = Settings(p2p_level=level, channels=8, buffsize=524288)
    path = tmp_path / "graph.xml"
    farthest = "NVL" if level is None else "PHB"
    text = graph_text(
        rings, settings, rate_gbps=320.0, type_intra=farthest, provenance="not measured"
    )
    path.write_text(text)
    variables = {**environment(settings), "NCCL_GRAPH_FILE": str(path)}
    answers, log = all_reduce(gpus, variables, tmp_path / "log")
    assert all(answer["right"] for answer in answers)
    assert_loaded(log, rings, gpus)
    transports = {transport_of(connection.via) for connection in log.connections}
    seen = view(machine, knowledge, settings, gpus=gpus)
    ways = {pair_mechanism(seen, *hop) for ring in rings for hop in neighbours(ring)}
    assert transports == {"SHM" if way == "bounce" else "P2P" for way in ways}
    verdict = validate(
        text,
        machine,
        knowledge,
        gpus=gpus,
        nodes=1,
        version=log.version or "2.28",
        environment=variables,
        where=str(path),
    )
    assert verdict.verdict == "used"
    assert all(map(same_rings, log.communicators[0], verdict.rings))
    assert len(log.communicators[0]) == final_channels(Settings(channels=8), sm=machine.gpus[0].sm)
    print(level, "two rings:", answers[0]["busbw_gbps"], "GB/s at 64 MiB")


def test_a_graph_for_other_gpus_fails_in_nccl_as_the_validator_says(simulated, tmp_path):
    plan = load_plan(simulated)
    if len(plan.gpus) < 3:
        pytest.skip("needs 3 GPUs")
    graph = simulated / "nccl" / "graph.xml"
    verdict = validate(
        graph.read_text(),
        plan.machine,
        Knowledge(),
        gpus=plan.gpus[:2],
        nodes=1,
        version="2.28",
        environment={},
        where="graph.xml",
    )
    assert verdict.verdict == "rejected"
    with pytest.raises(AssertionError, match=r"not found|NCCL"):
        all_reduce(plan.gpus[:2], {"NCCL_GRAPH_FILE": str(graph)}, tmp_path / "log")
