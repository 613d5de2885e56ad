"""Tuning by message size on GPUs without P2P: entries gain by the plugin, and harm nowhere.

TCCL_KEEP names a folder in which the rows of both runs are kept.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tccl_py.experiments.sizes import load_sizes
from tccl_py.plan.load import load_plan
from tccl_py.plan.results import Tuning, load_tuning
from tests.gpu.ranks import PINNED, REAL, REPOSITORY
from tests.skips import needs

pytestmark = [pytest.mark.gpu(count=2, virtual_s=280), pytest.mark.timeout(580)]

BRIEF = ("--sizes", "128K,256K,512K,1M,8M" if REAL else "1M", "--seconds", "40" if REAL else "10")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("without_p2p", marks=pytest.mark.gpu(count=2, real=True)),
        pytest.param("measured_for_jobs"),
    ],
)
def tuned(request, tmp_path_factory):
    """A plan of this machine, tuned, and its tunings."""
    needs("torch")
    place = tmp_path_factory.mktemp("tuned") / "plan"
    shutil.copytree(request.getfixturevalue(request.param), place)
    pinned = request.param == "without_p2p"
    variables = {**os.environ, **({"NCCL_P2P_DISABLE": "1"} if pinned else {})}
    command = [sys.executable, "-m", "tccl_py", "verify", place, "--tune", *BRIEF, *PINNED]
    command += ["--pin-env", "NCCL_P2P_DISABLE"] if pinned else []
    done = subprocess.run(
        command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    if keep := os.environ.get("TCCL_KEEP"):
        shutil.copy(place / Tuning.FILE, Path(keep) / f"{request.param}.json")
    return place, load_sizes(place)


def test_the_plugins_table_is_nowhere_slower_than_nccls_own_choice(tuned):
    place, tunings = tuned
    entries = [entry for tuning in tunings for entry in tuning.entries]
    assert (load_tuning(load_plan(place), place).tables != ()) == bool(entries)
    if any(tuning.entries for tuning in tunings[:2]):
        assert any(tuning.by_plugin for tuning in tunings), "the plugin's table was not timed"
    for tuning in tunings:
        for row in tuning.by_plugin:
            inside = [
                entry
                for entry in tuning.entries
                if entry.collective == row.collective
                and entry.from_bytes <= row.bytes <= entry.to_bytes
            ]
            assert not inside or row.fresh.middle >= 0.99 or not REAL


@pytest.mark.gpu(count=2, real=True)
def test_predictions_of_gains_hold_in_fresh_jobs(tuned):
    _, tunings = tuned
    right, asked = map(sum, zip(*(tuning.predictions for tuning in tunings), strict=True))
    assert asked
    assert right >= 0.9 * asked, f"{right} of {asked}"
