"""No mixture of ranks is given unlike variables or files: such a communicator would hang."""

import subprocess
import sys

import msgspec
import pytest

from tests.plugin.mixtures import Spec, draw, indices
from tests.plugin.programs import RECORDS, StandIn
from tests.plugin.runs import ROOT

MIXTURES = 150
BUSES = {gpu: f"0000:{16 + gpu:02x}:00.0" for gpu in range(8)}


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_ranks_of_any_mixture_are_given_the_same(tmp_path, version):
    standin = StandIn(tmp_path)
    spec = Spec(
        mixtures=[draw(seed, version) for seed in range(MIXTURES)],
        indices=indices(tmp_path, version, BUSES),
        plugin=str(standin.plugin),
        libraries=[str(library) for library in standin.libraries],
        record=str(RECORDS / f"asked-by-{version}.txt"),
        version=version,
    )
    path = tmp_path / "spec.json"
    path.write_bytes(msgspec.json.encode(spec))
    command = [sys.executable, "-m", "tests.plugin.mixtures", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *wrong, counts = done.stdout.splitlines()
    assert wrong == []
    graphs, buffers = (int(part.split()[0]) for part in counts.split(", ")[1:])
    assert graphs > MIXTURES
    assert buffers > MIXTURES // 2
