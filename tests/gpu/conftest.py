"""Plans of this machine that several files of tests look at, each made once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tccl_py.nccl.plugin.build import build_plugin
from tccl_py.plan.load import load_plan
from tccl_py.planning.planner import make_plan
from tccl_py.simulator.descriptions import load_machine
from tccl_py.simulator.source import Simulator
from tests.gpu.ranks import BRIEF, REAL, REPOSITORY, SHARE, torch_nccl
from tests.planned import needing_a_graph


def tccl(*words, **variables):
    command = [sys.executable, "-m", "tccl_py", *map(str, words)]
    surroundings = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=surroundings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def planned(tmp_path_factory, name, *words, **variables):
    """The directory of a plan made by measuring: in TCCL_TEST_PLANS, if set, by any part's tests.

    Tests that change it are of one part.
    """
    shared = os.environ.get("TCCL_TEST_PLANS")
    place = (Path(shared) if shared else tmp_path_factory.mktemp("plans")) / name
    if not (place / "plan.json").exists():
        print(tccl("plan", place, *BRIEF, *words, **SHARE, **variables))
        # tccl-py need not be installed here, and graph files with placed buffers need it.
        build_plugin(place / "nccl")
    return place


@pytest.fixture(scope="session")
def simulated(tmp_path_factory):
    """A plan by the machine's description, for torch's NCCL if there is one."""
    folder = tmp_path_factory.mktemp("simulated")
    tccl("discover", "-o", folder / "machine.json")
    options = ["--nccl", f"{version[0]}.{version[1]}"] if (version := torch_nccl()) else []
    tccl("plan", folder / "plan", "--simulate", folder / "machine.json", *options)
    return folder / "plan"


@pytest.fixture(scope="session")
def files_for_all_sets(simulated):
    """The same with a graph file for each set of GPUs, all of which gain by it."""
    model = load_machine(simulated.parent / "machine.json")
    version = load_plan(simulated).settings.version
    source = Simulator(model)
    plan = make_plan(model.machine, model.knowledge, source, version=version, subsets=True)
    return needing_a_graph(plan)


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """A plan made by measuring."""
    return planned(tmp_path_factory, "measured")


@pytest.fixture(scope="session")
def measured_for_jobs(request, tmp_path_factory):
    """The same for tests of many jobs: of two GPUs where these are virtual, which start soon."""
    if REAL:
        return request.getfixturevalue("measured")
    return planned(tmp_path_factory, "measured-pair", "--gpus", "0,2")


@pytest.fixture(scope="session")
def without_p2p(tmp_path_factory):
    """The same where NCCL has no P2P.

    Jobs then have 32 channels: all blocks of two jobs of two ranks fit on one real GPU.
    """
    pinned = ("--pin-env", "NCCL_P2P_DISABLE", *(() if REAL else ("--gpus", "0,2")))
    return planned(tmp_path_factory, "without-p2p", *pinned, NCCL_P2P_DISABLE="1")


@pytest.fixture(scope="module")
def sharing():
    """Give the processes that a module starts to measure their share of a virtual GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in SHARE.items():
            patch.setenv(name, text)
        yield
