"""Nodes made of one machine's GPUs: measured under mpirun, planned, loaded by real NCCL.

Every "host" is a UTS namespace with a name of its own and some of the GPUs; NCCL is told the same
by NCCL_HOSTID. Both reach each other by the loopback interface over TCP. TCCL_KEEP names a folder
in which plans, journals and NCCL's logs are kept. test_hosts_of_virtual_gpus.py has virtual ones.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tccl_py.experiments.record import Verification
from tccl_py.nccl.communicators import parse_log, same_rings
from tccl_py.nccl.settings import environment
from tccl_py.planning.handle import load_plan
from tests.gpu.ranks import REPOSITORY, run_ranks
from tests.skips import needs

pytestmark = pytest.mark.timeout(900)
INTERFACE = "lo"
SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28)
REPEATS, PAIRS = 5, 4
WRAPPER = """#!/bin/sh
# A rank of its own host: name and GPUs by its number.
rank=$OMPI_COMM_WORLD_RANK
export CUDA_VISIBLE_DEVICES=$(echo "{gpus}" | cut -d' ' -f$((rank + 1)))
exec unshare --uts sh -c 'hostname node'$rank' && exec "$@"' rank "$@"
"""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(nodes, marks=pytest.mark.gpu(count=count, real=True), id=name)
        for name, count, nodes in (
            ("2 x 1", 2, ((0,), (1,))),
            ("2 x 2", 4, ((0, 1), (2, 3))),
            ("4 x 1", 4, ((0,), (1,), (2,), (3,))),
            ("2 x 4", 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
        )
    ],
)
def planned(request, tmp_path_factory):
    """The plan that `tccl plan` makes under mpirun, and where it is."""
    needs("mpirun", "unshare")
    nodes = request.param
    folder = tmp_path_factory.mktemp(f"nodes{len(nodes)}")
    wrapper = folder / "rank.sh"
    wrapper.write_text(WRAPPER.format(gpus=" ".join(",".join(map(str, one)) for one in nodes)))
    wrapper.chmod(0o755)
    directory = folder / "plan"
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(len(nodes)), wrapper]
    command += [sys.executable, "-m", "tccl_py", "plan", directory, "--nccl", "2.28"]
    command += ["--interfaces", INTERFACE, "--json", "--max-sets", "200"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    keep(folder, directory)
    print(done.stderr[-3000:])
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    plan = load_plan(directory)
    assert told["rings"] == [list(ring) for ring in plan.channel_rings]
    print(f"{len(nodes)} nodes: {plan.sets_measured} sets. {plan.advice} {plan.notices}")
    for name, choice in plan.choices.items():
        predicted, achieved = choice.rate_gbps, choice.achieved_gbps
        print(f"{name}: predicted {predicted}, achieved {achieved}, {environment(choice.settings)}")
    return nodes, plan, directory


def keep(folder, directory):
    place = os.environ.get("TCCL_KEEP")
    if place and directory.is_dir():
        archive = Path(place) / folder.name
        shutil.make_archive(str(archive), "gztar", directory)


def all_reduce(nodes, plan, folder, *, directory, choice="default"):
    """One all-reduce job over the nodes: bus bandwidth by size, and the text of rank 0's log."""
    folder.mkdir()
    names = plan.host_order if choice == "graph" else plan.cluster.names
    order = [int(name.removeprefix("node")) for name in names]
    gpus = [gpu for node in order for gpu in nodes[node]]
    environments = []
    for rank, gpu in enumerate(gpus):
        name = next(f"node{number}" for number, node in enumerate(nodes) if gpu in node)
        variables = {"NCCL_SOCKET_IFNAME": f"={INTERFACE}"}
        if choice != "default":
            variables |= environment(plan.choices[choice].settings)
        if choice == "graph":
            variables["NCCL_GRAPH_FILE"] = str(directory / "nccl" / "hosts" / f"{name}.xml")
        variables |= {
            "NCCL_HOSTID": name,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,NET",
            "NCCL_DEBUG_FILE": str(folder / f"log{rank}"),
        }
        environments.append({**os.environ, **variables})
    words = [sys.executable, "-c", _RANK]
    commands = [[*words, rank, len(gpus), folder / "meet"] for rank in range(len(gpus))]
    codes, outputs = run_ranks(commands, environments)
    assert codes == [0] * len(gpus), outputs
    answers = [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]
    assert all(answer["right"] for answer in answers)
    slowest = {size: min(one["gbps"][str(size)] for one in answers) for size in SIZES}
    return slowest, (folder / "log0").read_text()


_RANK = f"""
import json, sys
import torch, torch.distributed as dist
from tests.gpu.collective import check, measure
rank, world, meet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group(
    "nccl", init_method="file://" + meet, rank=rank, world_size=world, device_id=device
)
right = all(check(torch, rank, world, device, count) for count in (1, 1027, {SIZES[-1]} // 4))
gbps = {{size: measure(torch, world, device, size // 4, {REPEATS}) for size in {SIZES}}}
dist.destroy_process_group()
print(json.dumps({{"right": right, "gbps": gbps}}), flush=True)
"""


def test_nccl_loads_the_graph_files_of_the_nodes(planned, tmp_path):
    nodes, plan, directory = planned
    _, log = all_reduce(nodes, plan, tmp_path / "job", directory=directory, choice="graph")
    (rings,) = parse_log(log, where="log").communicators
    assert rings
    wanted = plan.channel_rings
    for number, ring in enumerate(rings):
        assert same_rings(ring, wanted[number % len(wanted)]), (number, ring)
    if os.environ.get("TCCL_KEEP"):
        (Path(os.environ["TCCL_KEEP"]) / f"{len(nodes)}-nodes-plan.log").write_text(log)


def test_the_plans_choice_is_no_slower_and_gets_what_the_plan_says(planned, tmp_path):
    """The recommended choice, or that offered for large messages where it is default NCCL."""
    nodes, plan, directory = planned
    recommended = plan.recommended != "default"
    name = plan.recommended if recommended else "variables"
    ratios = {size: [] for size in SIZES}
    large = []
    for turn in range(PAIRS):
        mine, _ = all_reduce(
            nodes, plan, tmp_path / f"plan{turn}", directory=directory, choice=name
        )
        default, _ = all_reduce(nodes, plan, tmp_path / f"default{turn}", directory=directory)
        large.append(mine[SIZES[-2]])
        for size in SIZES:
            ratios[size].append(mine[size] / default[size])
    medians = {size: round(statistics.median(found), 3) for size, found in ratios.items()}
    expected = plan.choices[name].best_known_gbps
    print(f"{len(nodes)} nodes: {name} / default {medians}; expected {expected}, got {large}")
    assert all(medians[size] >= 0.97 for size in (SIZES if recommended else SIZES[-2:]))
    assert abs(statistics.median(large) / expected - 1) <= 0.2


def test_verify_answers_for_the_nodes_and_finds_the_plans_rings(planned):
    nodes, _, directory = planned
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(len(nodes))]
    command += [directory.parent / "rank.sh", sys.executable, "-m", "tccl_py", "verify", directory]
    command += ["--sizes", "1M,64M", "--rounds", "6", "--seconds", "60", "--json"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400, check=False
    )
    print(done.stderr[-3000:])
    assert done.returncode in (0, 1), done.stderr[-3000:]
    found = json.loads(done.stdout)
    graph = next(arm for arm in found["arms"] if arm["name"] == "graph")
    assert (graph["wrong"], graph["failure"]) == ([], "")
    assert graph["rings"] == {"same": True, "differences": []}
    kept = Verification.load(directory)
    assert set(kept.hosts) == {f"node{number}" for number in range(len(nodes))}
    for one in kept.judged.sizes:
        c = one.compared
        print(one.bytes, f"{one.gbps:.2f} {c.ratio:.4f} {c.low:.4f} {c.high:.4f}", one.verdict)
