"""All that a user does with a machine, one command after another, and nothing left behind.

`scripts/test-gpu --part path --topology FILE` walks it on the virtual GPUs of any NCCL topology.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tccl_py.nccl.plugin.build import build_plugin
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.retuning import retune
from tccl_py.readers.live import discover_machine
from tests.gpu.ranks import BRIEF, CHANNELS, PINNED, REAL, REPOSITORY, SHARE, run_ranks
from tests.gpu.test_profiler_on_gpus import eventually, used_mib, workers
from tests.planned import needing_a_graph, replace_plan
from tests.plugin.logs import assert_own_rings
from tests.skips import needs

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(580)]

JOBS = () if REAL else ("--choice", "graph", "--sizes", "1M", "--seconds", "4")
KEPT_MIB = 16 if REAL else 200
"""GPU memory that may stay: of a virtual GPU what MPS keeps once programs were there."""
TUNED = ("--tune", "--sizes", "64K,1M", "--seconds", "60")
ON_TWO = pytest.mark.skipif(not REAL, reason="test_size_tuning_on_gpus.py does it on two")
"""Jobs of all virtual GPUs start slowly, and these commands start a hundred."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all that the commands write, a home among it."""
    needs("torch")
    return tmp_path_factory.mktemp("walk")


@pytest.fixture(scope="module")
def before():
    """What was here: shared memory, temporary folders, workers and GPU memory."""
    return _here(), used_mib()


@pytest.fixture(scope="module")
def tccl(folder, before):
    """Run a command; return its output."""
    print("memory and files before:", before)

    def run(*words, codes=(0,), **variables):
        surroundings = {**os.environ, "HOME": str(folder), **variables}
        surroundings |= {"XDG_CONFIG_HOME": f"{folder}/config", "XDG_STATE_HOME": f"{folder}/s"}
        command = [sys.executable, "-m", "tccl_py", *map(str, words)]
        begun = time.monotonic()
        done = subprocess.run(
            command, cwd=REPOSITORY, env=surroundings, capture_output=True, text=True, check=False
        )
        print(f"{time.monotonic() - begun:.1f} s, {done.returncode}: $ tccl", *words, flush=True)
        print(f"{done.stdout[-4000:]}{done.stderr[-4000:]}", flush=True)
        assert done.returncode in codes, (words, done.returncode, done.stderr[-3000:])
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def directory(tccl, folder):
    """The plan's."""
    tccl("plan", folder / "plan", *BRIEF, **SHARE)
    return folder / "plan"


@pytest.fixture
def conf(tccl, folder):
    """An nccl.conf, which loses what is installed there."""
    yield folder / "nccl.conf"
    tccl("uninstall", folder / "nccl.conf")
    assert not (folder / "nccl.conf").exists()


def test_discover_doctor_and_advise_answer(tccl, folder):
    tccl("discover", "-o", folder / "machine.json")
    assert "run it as root" not in tccl("doctor", "--json", codes=(0, 1))
    tccl("advise", **SHARE)


def test_a_plan_is_of_all_gpus_and_is_shown(tccl, directory):
    plan = load_plan(directory)
    assert plan.gpus == discover_machine()[0].gpu_indices
    assert not plan.simulated
    for command in ("show", "report"):
        tccl(command, directory)


def test_jobs_by_each_choice_sum_rightly_over_the_plans_rings(tccl, directory):
    brief = ("--json", "--rounds", "6", *JOBS, *PINNED)
    verified = json.loads(tccl("verify", directory, *brief, codes=(0, 1)))
    for arm in verified["arms"]:
        assert (arm["wrong"], arm["failure"]) == ([], "")
        assert (arm["rings"] or {"same": True})["same"], arm["rings"]


def test_an_unmodified_program_sums_rightly_by_an_installed_plan(tccl, directory, conf, folder):
    plan = load_plan(directory)
    tccl("install", with_winner(plan, "variables", folder), "--conf", conf, "--force")
    program(len(plan.gpus), conf, folder / "job")


def test_its_communicators_have_the_rings_of_their_gpus_by_an_installed_plugin(
    tccl, directory, conf, folder
):
    plan = load_plan(directory)
    place = with_winner(needing_a_graph(plan), "graph", folder)
    build_plugin(place / "nccl")
    tccl("install", place, "--conf", conf, "--force")
    logs = program(len(plan.gpus), conf, folder / "job-with-files")
    counts = assert_own_rings(load_plan(place), logs)
    assert counts[plan.gpus] > 1, counts
    print(counts)


def test_explain_check_and_preflight_measure_again(tccl, directory):
    tccl("show", "--why", directory, "--max-sets", "4", "--max-causes", "1", **SHARE)
    tccl("check", directory, "--max-seconds", "45", codes=(0, 1), **SHARE)
    tccl("check", directory, "--preflight", "--json", codes=(0, 1), **(SHARE | _pinned()))


@ON_TWO
def test_choices_by_message_size_are_tuned(tccl, directory):
    tccl("verify", directory, *TUNED, *PINNED, codes=(0, 1))


def test_nothing_is_left(tccl, before):
    here, memory = before
    assert eventually(lambda: _here() <= here), _here() - here
    assert eventually(lambda: used_mib() <= memory + KEPT_MIB), (memory, used_mib())


def with_winner(plan, choice, folder):
    """The directory of the same plan where jobs found a choice best."""
    place = folder / choice
    place.mkdir()
    _, _, fingerprint = discover_machine()
    plan = plan if REAL else with_few_channels(plan)
    best = msgspec.structs.replace(plan, winner=choice)
    write_plan(best, place, fingerprint=fingerprint)
    return place


def with_few_channels(plan):
    """The same plan without variables for more channels: all blocks have to fit on one real GPU."""
    replace = msgspec.structs.replace
    by_variables = replace(plan.choices["variables"].settings, min_channels=None)
    plan = replace_plan(plan, variables=replace(plan.choices["variables"], settings=by_variables))
    channels = min(plan.settings.channels, 4)
    return retune(plan, replace(plan.settings, channels=channels, min_channels=None))


def program(size, conf, folder):
    """Run a program of torch on all GPUs with an nccl.conf; return NCCL's log of each rank."""
    folder.mkdir()
    environment = {**os.environ, "NCCL_CONF_FILE": str(conf), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV"}
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(size)))
    words = [sys.executable, "-m", "tests.gpu.plugin_rank", "eager"]
    commands = [[*words, rank, size, folder] for rank in range(size)]
    logs = [folder / f"log{rank}" for rank in range(size)]
    environments = [{**environment, "NCCL_DEBUG_FILE": str(log)} for log in logs]
    begun = time.monotonic()
    codes, outputs = run_ranks(commands, environments, timeout=120)
    print(f"{time.monotonic() - begun:.1f} s: groups, splits, meshes, pipeline, FSDP", flush=True)
    assert codes == [0] * size, [error[-2000:] for _, error in outputs]
    assert all(out.strip().endswith("all sums are right") for out, _ in outputs)
    return [log.read_text() for log in logs]


def _pinned():
    return {name: os.environ[name] for name in CHANNELS}


def _here():
    """Shared memory, folders of this project for temporary files, and workers."""
    folders = {Path("/tmp"), Path(os.environ.get("TMPDIR", "/tmp"))}
    temporary = (path for folder in folders for path in folder.glob("*tccl*"))
    return {*Path("/dev/shm").iterdir(), *temporary, *workers()}
