"""Where the pages of NCCL's buffers lie on a host with two NUMA nodes (QEMU, no GPU)."""

import json
import sys
from pathlib import Path

import pytest

from tests.nccl_host import FOLDER, patience
from tests.plugin.guest import run_in_guest
from tests.plugin.runs import VERSIONS, make_plan, needs_host, plugin_library

HERE = Path(__file__).resolve().parent
BUSES = {gpu: f"0000:{bus}:00.0" for gpu, bus in enumerate(("01", "41", "02", "42"))}
NODES = {0: 1, 1: 0, 2: 1, 3: 0}
"""Each GPU's buffers on the other node: never where NCCL would put them."""
GPU = """<pci busid="{bus}" class="0x030000" vendor="0x10de" device="0x20b0" link_width="16" \
subsystem_vendor="0x10de" subsystem_device="0x134f" link_speed="16.0 GT/s PCIe">
<gpu dev="{gpu}" sm="80" rank="{gpu}" gdr="0"/></pci>"""
CPU = """<cpu host_hash="0x1" numaid="{node}" affinity="0000000{mask}" arch="x86_64" \
vendor="AuthenticAMD" familyid="143" modelid="49">{gpus}</cpu>"""
JOB = """
export PATH=/usr/bin:/bin HOME=/run FAKE_GPUS=4 FAKE_BUSES={buses} FAKE_PAGES=1
export NCCL_SOCKET_IFNAME=lo NCCL_RAS_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0
export NCCL_NVLS_ENABLE=0 NCCL_P2P_DISABLE=1 NCCL_MAX_NCHANNELS=1 NCCL_BUFFSIZE=262144
export NCCL_LL_BUFFSIZE=65536 NCCL_LL128_BUFFSIZE=122880
export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,SHM,ALLOC,ALLOC_HOST NCCL_SHM_LOCALITY=1
export NCCL_TOPO_FILE={folder}/topology.xml
cp -r {folder}/plan /run/plan; chmod 755 /run /run/plan
play() {{ # NAME VERSION NCCL_CUMEM_ENABLE COMMUNICATOR...
  name=$1 library={host}/$2 NCCL_CUMEM_ENABLE=$3; shift 3
  echo "run $name"
  NCCL_CUMEM_ENABLE=$NCCL_CUMEM_ENABLE LD_LIBRARY_PATH=$library:{host}/cuda LD_PRELOAD={patience} \
    NCCL_ENV_PLUGIN={plugin} TCCL_INDEX=/run/plan/plugin.index {python} {program} /run/$name "$@"
}}
play at-init 2.28.9 0 planned default own
play at-first-call 2.30.7 1 planned
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The records of both ranks, by run."""
    folder = tmp_path_factory.mktemp("placement")
    for version in VERSIONS:
        needs_host(version)
    make_plan(folder / "plan", buses=BUSES, sizes=(2,), missing=((2, 3),), nodes=NODES)
    gpus = ["", ""]
    for gpu, bus in BUSES.items():
        gpus[gpu % 2] += GPU.format(bus=bus, gpu=gpu)
    cpus = (CPU.format(node=node, mask=node + 1, gpus=gpus[node]) for node in range(2))
    (folder / "topology.xml").write_text(f'<system version="1">{"".join(cpus)}</system>\n')
    script = JOB.format(
        buses=",".join(BUSES.values()),
        folder=folder,
        host=FOLDER.resolve(),
        plugin=plugin_library(),
        patience=patience(),
        python=f"{Path(sys.executable).resolve()} -S -E",
        program=HERE / "placed.py",
    )
    found, name = {}, ""
    for line in run_in_guest(folder, script).splitlines():
        if line.startswith("run "):
            name = line.split()[1]
        elif line.startswith("{"):
            record = json.loads(line)
            found.setdefault(name, {})[record["rank"]] = record
    return found


EACH = pytest.mark.parametrize(
    "run, name",
    [
        ("at-init", "planned"),
        ("at-init", "default"),
        ("at-first-call", "planned"),
    ],
)


@EACH
def test_all_pages_of_fifos_are_on_the_planned_node_or_where_nccl_puts_them(ranks, run, name):
    assert len(ranks[run]) == 2
    for rank, record in ranks[run].items():
        node = NODES[rank] if name == "planned" else rank
        assert record[name]["code"] == 0
        assert (record[name]["early"] > 0) == (run == "at-init")
        assert record[name]["fifos"][node] > 100
        assert record[name]["fifos"][1 - node] == 0


@EACH
def test_memory_of_the_program_stays_on_its_own_node(ranks, run, name):
    for rank, record in ranks[run].items():
        known = {"before": record["before"]} | record[name]
        for when in ("before", "during", "after"):
            assert known[when][rank] > 0, (rank, when, known[when])
            assert known[when][1 - rank] == 0, (rank, when, known[when])
        assert record[name]["policy"] == [0, 0]
        assert record[name]["policies"] == [[0, 0]]


def test_little_else_is_on_the_planned_node(ranks):
    for run in ranks.values():
        for rank, record in run.items():
            assert record["planned"]["anonymous"][NODES[rank]] < 1024


def test_a_memory_policy_of_the_user_is_kept(ranks):
    for record in ranks["at-init"].values():
        assert record["own"]["code"] == 0
        assert record["own"]["policy"] == [3, 3]
        pages = record["own"]["fifos"]
        assert abs(pages[0] - pages[1]) <= 1
