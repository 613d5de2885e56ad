"""Real NCCL loads our topology files: right sums, the channels that our emulation says, no loss.

Needs two GPUs or more and torch with NCCL. NCCL_NVLS_ENABLE is taken from the environment as it is.
"""

import json
import os
import statistics

import msgspec
import pytest

from tccl_py.model.machine import PciLink
from tccl_py.nccl.communicators import same_rings
from tccl_py.nccl.graph_search import default_rings
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import view
from tccl_py.readers.live import discover_machine
from tccl_py.readers.nccl_topology import read_nccl_topology
from tests.gpu.ranks import REAL
from tests.gpu.test_nccl_loads_plans import all_reduce
from tests.topology_writer import topology_xml

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(300)]
PAIRS = int(os.environ.get("TCCL_PAIRS", "3" if REAL else "1"))
"""How often to run with the file and without, in turn; fewer where GPU time is short."""


def emulated(machine, knowledge, settings):
    """The final channels' GPU orders that NCCL should run."""
    choice = default_rings(view(machine, knowledge, settings))
    return [choice.rings[at % len(choice.rings)] for at in range(choice.channels)]


def written(folder, name, machine, comment=("a test",)):
    path = folder / f"{name}.xml"
    path.write_text(topology_xml(machine, comment=comment))
    return {"NCCL_TOPO_FILE": str(path)}


def in_ranks(machine, rings):
    rank = {gpu: number for number, gpu in enumerate(machine.gpu_indices)}
    return [tuple(rank[gpu] for gpu in ring) for ring in rings]


@pytest.mark.parametrize("level", [None, "LOC"])
def test_nccl_runs_what_the_emulation_says_of_the_file_and_is_not_slower(level, tmp_path):
    machine, knowledge, _ = discover_machine()
    variables = {} if level is None else {"NCCL_P2P_DISABLE": "1"}
    file = written(tmp_path, "topo", machine)
    rates = {"with": [], "without": []}
    for number in range(PAIRS):
        for name, more in (("with", file), ("without", {})):
            log_path = tmp_path / f"{name}-{number}"
            answers, log = all_reduce(machine.gpu_indices, {**variables, **more}, log_path)
            assert all(answer["right"] for answer in answers)
            (found,) = log.communicators
            settings = Settings(version=log.version or "2.28", p2p_level=level)
            expected = in_ranks(machine, emulated(machine, knowledge, settings))
            assert len(found) == len(expected)
            assert all(map(same_rings, found, expected))
            rates[name].append(answers[0]["busbw_gbps"])
    with_file, without = (statistics.median(rates[name]) for name in ("with", "without"))
    print(json.dumps({"level": level, "rates_gbps": rates, "ratio": with_file / without}))
    assert with_file >= 0.95 * without or not REAL


def test_what_nccl_makes_of_the_file_is_what_it_says(tmp_path):
    machine, _, _ = discover_machine()
    dump = tmp_path / "dump.xml"
    file = written(tmp_path, "topo", machine)
    variables = {**file, "NCCL_TOPO_DUMP_FILE": str(dump)}
    all_reduce(machine.gpu_indices, variables, tmp_path / "log")
    theirs = read_nccl_topology(dump)
    assert [(gpu.index, gpu.bus_id, gpu.sm, gpu.link) for gpu in theirs.gpus] == [
        (gpu.index, gpu.bus_id, gpu.sm, gpu.link) for gpu in machine.gpus
    ]
    assert [(one.vendor, one.family, one.model) for one in theirs.numa_nodes] == [
        (one.vendor, one.family, one.model) for one in machine.numa_nodes
    ]
    links = {(link.source, link.target, link.count) for link in theirs.nvlinks}
    assert links == {(link.source, link.target, link.count) for link in machine.nvlinks}


def test_nccl_believes_slower_links(tmp_path):
    machine, knowledge, _ = discover_machine()
    gpus = tuple(
        msgspec.structs.replace(gpu, link=PciLink(speed_gts=8.0, width=16)) for gpu in machine.gpus
    )
    slow = msgspec.structs.replace(machine, gpus=gpus)
    file = written(tmp_path, "slow", slow)
    dump = tmp_path / "dump.xml"
    variables = {**file, "NCCL_P2P_DISABLE": "1", "NCCL_TOPO_DUMP_FILE": str(dump)}
    answers, log = all_reduce(machine.gpu_indices, variables, tmp_path / "log")
    assert all(answer["right"] for answer in answers)
    theirs = read_nccl_topology(dump)
    assert [gpu.link for gpu in theirs.gpus] == [gpu.link for gpu in slow.gpus]
    settings = Settings(version=log.version or "2.28", p2p_level="LOC")
    (found,) = log.communicators
    expected = emulated(slow, knowledge, settings)
    own = emulated(machine, knowledge, settings)
    print(json.dumps({"channels": len(found), "emulated": len(expected), "own": len(own)}))
    assert len(found) == len(expected)
    assert all(map(same_rings, found, in_ranks(machine, expected)))


def test_a_subset_takes_the_file_of_all(tmp_path):
    machine, _, _ = discover_machine()
    if len(machine.gpus) < 3:
        pytest.skip("needs 3 GPUs")
    answers, _ = all_reduce(
        machine.gpu_indices[:2], written(tmp_path, "topo", machine), tmp_path / "log"
    )
    assert all(answer["right"] for answer in answers)
