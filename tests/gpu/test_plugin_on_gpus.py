"""Unmodified torch programs with the NCCL plugin on real GPUs: each communicator has its own rings.

A line of nccl.conf names the plugin, another one its index; a program of torch makes communicators
in many ways. Every subset of the GPUs has a graph file, so each communicator of two GPUs or more
has to run the rings of its own file. NCCL_NVLS_ENABLE is taken from the environment as it is, and
TCCL_KEEP names a folder in which NCCL's logs are kept.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from tccl_py.delivery.plugin import plugin_exports
from tccl_py.nccl.plugin.build import build_plugin
from tccl_py.nccl.plugin.index import INDEX_FILE
from tccl_py.nccl.tuner import TunerEntry, TunerTable
from tccl_py.plan.directory import write_plan
from tccl_py.plan.results import Tuning, keep_tuning
from tccl_py.plan.retuning import retune
from tccl_py.readers.live import discover_machine
from tests.gpu.ranks import groups_of, run_ranks, torch_nccl
from tests.plugin.logs import assert_own_rings
from tests.skips import needs

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def planned(files_for_all_sets):
    """How many GPUs, a plan for them and for torch's NCCL, and the host's fingerprint."""
    needs("torch")
    if (version := torch_nccl()) < (2, 28, 7):
        pytest.skip(f"NCCL {version} has no environment plugins")
    _, _, fingerprint = discover_machine()
    plan = files_for_all_sets
    return len(plan.gpus), plan, fingerprint


def install(folder, plan, fingerprint):
    """Write a plan and the library beside it; return the text of an nccl.conf that loads both."""
    folder.mkdir()
    write_plan(plan, folder, fingerprint=fingerprint)
    assert (folder / "nccl" / INDEX_FILE).is_file()
    build_plugin(folder / "nccl")
    return "".join(f"{name}={value}\n" for name, value in plugin_exports(plan, folder).items())


def run_job(way, size, conf, folder, **variables):
    """Run one rank a GPU; return their errors and NCCL's log of each rank."""
    kept = ("NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME", "NCCL_MULTI_RANK_GPU_ENABLE")
    environment = {
        name: text
        for name, text in os.environ.items()
        if name in kept or not name.startswith(("TCCL_", "NCCL_"))
    }
    environment |= variables | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(size))),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_CONF_FILE": str(conf),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV,TUNING",
    }
    program = [sys.executable, "-m", "tests.gpu.plugin_rank", way]
    commands = [[*program, rank, size, folder] for rank in range(size)]
    logged = [{**environment, "NCCL_DEBUG_FILE": str(folder / name)} for name in _logs(size)]
    codes, outputs = run_ranks(commands, logged)
    logs = [path.read_text() if path.exists() else "" for path in map(folder.joinpath, _logs(size))]
    if keep := os.environ.get("TCCL_KEEP"):
        for rank, name in enumerate(_logs(size)):
            shutil.copy(folder / name, f"{keep}/plugin-{size}-{way}-{rank}")
    ends = [f"rank {n}: {err[-3000:]}" for n, (_, err) in enumerate(outputs)]
    said = [line for line in "\n".join(logs).splitlines() if "tccl" in line or "WARN" in line]
    told = "\n".join([*ends, *said[:60]])
    assert codes == [0] * size, told
    assert all(out.strip().endswith("all sums are right") for out, _ in outputs), told
    return logs


def _logs(size):
    return [f"log{rank}" for rank in range(size)]


@pytest.mark.parametrize("way", ["lazy", "eager", "background"])
def test_communicators_of_unmodified_programs_run_the_rings_of_their_gpus(planned, tmp_path, way):
    size, plan, fingerprint = planned
    if way == "eager":
        # Called measured, so that the plugin compares GPUs, driver and NUMA nodes with the host's.
        plan = msgspec.structs.replace(plan, simulated=False)
    conf = tmp_path / "nccl.conf"
    conf.write_text(install(tmp_path / "plan", plan, fingerprint))
    before = boards()
    variables = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"} if way == "background" else {}
    logs = run_job(way, size, conf, tmp_path, **variables)
    counts = assert_own_rings(plan, logs)
    assert {tuple(one) for one in groups_of(size) if len(one) > 1} <= counts.keys(), counts
    print(f"{size} GPUs, {way}: communicators by GPUs {dict(counts)}")
    assert boards() <= before


CHOICE = re.compile(r"AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+) channel{Lo..Hi}={0..(\d+)}")


def test_collectives_of_unmodified_programs_run_what_the_tables_say(planned, tmp_path):
    """Against NCCL's own choices: Simple for small messages and LL for large ones."""
    size, plan, fingerprint = planned
    conf = tmp_path / "nccl.conf"
    conf.write_text(install(tmp_path / "plan", plan, fingerprint))
    given = {"collective": "all_reduce", "algorithm": "ring"}
    entries = (
        TunerEntry(from_bytes=4096, to_bytes=8192, protocol="simple", channels=1, **given),
        TunerEntry(from_bytes=4 << 20, to_bytes=4 << 20, protocol="ll", channels=2, **given),
    )
    sets = [*(subset.gpus for subset in plan.subsets), plan.gpus]
    tables = tuple(TunerTable(gpus=gpus, measured_on=gpus, entries=entries) for gpus in sets)
    tuning = Tuning(choice=plan.recommended, nccl=plan.settings.version, tables=tables)
    keep_tuning(tuning, plan, tmp_path / "plan")
    logs = "".join(run_job("eager", size, conf, tmp_path))
    assert logs.count(": tuned by ") >= 2 * size
    found = {choice for choice in CHOICE.findall(logs) if choice[0] in ("4108", str(4 << 20))}
    assert found == {("4108", "RING", "SIMPLE", "0"), (str(4 << 20), "RING", "LL", "1")}
    print(f"{size} GPUs: {logs.count(': tuned by ')} memberships tuned, {sorted(found)}")


@pytest.mark.parametrize("way", ["lazy", "eager"])
def test_placed_buffers_change_nothing_on_the_nodes_that_nccl_takes(planned, tmp_path, way):
    """Every hop bounces, and the planned node of each GPU is its own: node 0 where none is told."""
    size, plan, fingerprint = planned
    replace = msgspec.structs.replace
    nodes = [replace(node, numa_id=max(0, node.numa_id)) for node in plan.machine.numa_nodes]
    machine = replace(plan.machine, numa_nodes=tuple(nodes))
    only = replace(plan.cluster.classes[0], machine=machine)
    plan = replace(plan, cluster=replace(plan.cluster, classes=(only,)))
    placed = {"p2p_level": "LOC", "shm_locality": "sender", "shm_placement": True}
    plan = retune(plan, replace(plan.settings, **placed))
    conf = tmp_path / "nccl.conf"
    conf.write_text(install(tmp_path / "plan", plan, fingerprint))
    logs = run_job(way, size, conf, tmp_path)
    assert_own_rings(plan, logs)
    for gpu, log in enumerate(logs):
        node = plan.machine.numa_nodes[plan.machine.numa_of(f"G{gpu}")].numa_id
        said = re.findall(r"host buffers (on NUMA node \d+|where NCCL .*)", log)
        assert said and set(said) <= {f"on NUMA node {node}"}
        assert "PROFILER/Plugin: Loaded tccl" in log
    print(f"{size} GPUs: buffers placed on {set(said)}")


def boards():
    return set(Path("/dev/shm").glob("tccl-*/*"))
