"""Groups of one training job on real NCCL: none fails, each has its own rings or stock's.

Tensor, data and pipeline groups over all GPUs, halves, pairs and single ones, splits, and GPUs in
another order for CUDA. NCCL_NVLS_ENABLE is taken from the environment as it is. TCCL_KEEP names a
folder in which NCCL's logs are kept.
"""

import json
import os
import re
import shutil
import sys

import msgspec
import pytest

from tccl_py.nccl.communicators import parse_log, same_rings
from tccl_py.plan.directory import machine_file, write_plan
from tccl_py.plan.load import load_plan
from tccl_py.readers.live import discover_machine
from tests.gpu.ranks import groups_of, run_ranks
from tests.planned import rebind

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def planned(files_for_all_sets, tmp_path_factory):
    """How many GPUs, and the directory of a plan for them and the NCCL that torch has.

    It is planned by a model and then called measured, so that its fingerprint is looked at.
    """
    pytest.importorskip("torch", reason="torch is not installed")
    folder = tmp_path_factory.mktemp("planned")
    plan = msgspec.structs.replace(files_for_all_sets, simulated=False)
    _, _, fingerprint = discover_machine()
    write_plan(plan, folder, fingerprint=fingerprint)
    return len(plan.gpus), folder


def run_job(size, plan_dir, way, folder, *, visible=None, **variables):
    """The ranks' answers, their errors, and NCCL's log of each rank."""
    folder.mkdir()
    surroundings = {
        **os.environ,
        **variables,
        "CUDA_VISIBLE_DEVICES": visible or ",".join(map(str, range(size))),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV",
    }
    words = [str(folder / "meet"), str(plan_dir), way]
    program = [sys.executable, "-m", "tests.gpu.groups"]
    commands = [[*program, rank, size, *words] for rank in range(size)]
    logged = [{**surroundings, "NCCL_DEBUG_FILE": str(folder / f"log{n}")} for n in range(size)]
    codes, outputs = run_ranks(commands, logged)
    assert codes == [0] * size, outputs
    logs = [(folder / f"log{rank}").read_text() for rank in range(size)]
    if os.environ.get("TCCL_KEEP"):
        for rank, text in enumerate(logs):
            shutil.copy(folder / f"log{rank}", os.environ["TCCL_KEEP"] + f"/{folder.name}-{rank}")
            assert text
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs], [e for _, e in outputs], logs


def wanted_rings(plan, gpus):
    """Rank orders of a group with these GPUs, in group order; None where the plan has no file."""
    found = plan.subset(gpus) if len(gpus) > 1 else None
    if found is None:
        return None
    place = {gpu: rank for rank, gpu in enumerate(gpus)}
    rings = [tuple(place[gpu] for gpu in ring) for ring in found.rings]
    return [rings[number % len(rings)] for number in range(plan.settings.channels)]


def graphs_read(log):
    """The graph file that each communicator of a process read, in order; None is none."""
    parts = re.split(r"comm \S+ rank \d+ nranks \d+ .*- Init START", log)[1:]
    found = [re.search(r"NCCL_GRAPH_FILE set by environment to (\S+)", part) for part in parts]
    return [None if match is None else match[1] for match in found]


def graph_of(directory, gpus, size):
    """The file that a group of these GPUs has to read."""
    if len(gpus) < 2:
        return None
    names = "-".join(map(str, sorted(gpus)))
    name = "graph.xml" if len(gpus) == size else f"subsets/graph-{names}.xml"
    path = directory / "nccl" / name
    return str(path) if path.is_file() else None


def assert_rings(plan, gpus_of, rank, answer, log):
    """The communicators in which a rank was first are its groups', in order."""
    found = parse_log(log, where=f"rank {rank}").communicators
    first = [ranks for ranks, _ in answer["right"] if ranks[0] == rank]
    assert len(found) >= len(first)
    compared = 0
    for ranks, rings in zip(first, found, strict=False):
        wanted = wanted_rings(plan, [gpus_of[one] for one in ranks])
        if wanted is None:
            assert {len(ring) for ring in rings} == {len(ranks)}
            continue
        compared += 1
        # Channels of a file are doubled, and no search of NCCL's changes them.
        assert len(rings) == 2 * len(wanted), (ranks, len(rings))
        assert all(
            same_rings(ring, wanted[number % len(wanted)]) for number, ring in enumerate(rings)
        )
    return compared


@pytest.mark.parametrize(
    ("way", "order"),
    [("eager", "as it is"), ("lazy", "reversed"), ("background", "as it is")],
)
def test_every_group_of_a_job_works_with_its_own_rings(planned, tmp_path, way, order):
    size, directory = planned
    gpus = list(range(size))
    if order == "reversed":
        gpus.reverse()
    visible = ",".join(map(str, gpus))
    answers, errors, logs = run_job(
        size, directory, way, tmp_path / f"{size}-{way}", visible=visible
    )
    assert [answer["gpu"] for answer in answers] == gpus
    assert all(answer["passed"] and answer["graph"] is None for answer in answers)
    assert all(right for answer in answers for _, right in answer["right"])
    assert not any(re.search("^tccl:", text, re.MULTILINE) for text in errors), errors
    plan = load_plan(directory)
    compared = [
        assert_rings(plan, gpus, rank, answer, log)
        for rank, (answer, log) in enumerate(zip(answers, logs, strict=True))
    ]
    for answer, log in zip(answers, logs, strict=True):
        of_groups = [[gpus[one] for one in ranks] for ranks, _ in answer["right"]]
        files = [graph_of(directory, one, size) for one in of_groups]
        read = graphs_read(log)
        # Communicators that torch makes later, for messages between two, read none.
        assert read == files + [None] * (len(read) - len(files))
        assert files[0] is not None
    made = sum(len(answer["right"]) for answer in answers)
    print(f"{size} GPUs, {way}, {order}: {made} memberships, rings compared by rank {compared}")
    assert sum(compared) >= len([one for one in groups_of(size) if len(one) > 1])


def test_a_plan_of_other_gpus_is_off_and_all_groups_work(planned, tmp_path):
    size, directory = planned
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    path = machine_file(load_plan(other), other)
    _, _, here = discover_machine()
    path.write_text(path.read_text().replace(here.gpu_uuids[1], "GPU-of-before"))
    rebind(other)
    answers, errors, logs = run_job(size, other, "eager", tmp_path / f"{size}-off")
    assert all(right for answer in answers for _, right in answer["right"])
    assert all(answer["passed"] for answer in answers)
    assert f"GPU 1 was GPU-of-before and is {here.gpu_uuids[1]}" in errors[0]
    assert "tccl:" not in errors[1]
    assert not any("NCCL_GRAPH_FILE set" in log for log in logs)
