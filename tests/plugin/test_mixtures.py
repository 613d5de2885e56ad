"""No mixture of ranks is given unlike variables or files: such a communicator would hang."""

import subprocess
import sys

import msgspec
import pytest

from tests.plugin.mixtures import Spec, draw, indices
from tests.plugin.programs import RECORDS, StandIn
from tests.plugin.runs import ROOT

MIXTURES = 100
BUSES = {gpu: f"0000:{16 + gpu:02x}:00.0" for gpu in range(8)}


def play(folder, version, count, **fields):
    """Play mixtures; return complaints, and how many graph files and buffer sizes were given."""
    standin = StandIn(folder)
    spec = Spec(
        mixtures=[draw(seed, version) for seed in range(count)],
        indices=indices(folder, version, BUSES),
        plugin=str(standin.plugin),
        libraries=[str(library) for library in standin.libraries],
        record=str(RECORDS / f"asked-by-{version}.txt"),
        version=version,
        **fields,
    )
    path = folder / "spec.json"
    path.write_bytes(msgspec.json.encode(spec))
    command = [sys.executable, "-m", "tests.plugin.mixtures", str(path)]
    options = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, cwd=ROOT, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    *wrong, counts = done.stdout.splitlines()
    return wrong, *(int(part.split()[0]) for part in counts.split(", ")[1:])


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_ranks_of_any_mixture_are_given_what_all_of_them_have(tmp_path, version):
    wrong, graphs, buffers, tables = play(tmp_path, version, MIXTURES)
    assert wrong == []
    assert graphs > MIXTURES
    assert min(buffers, tables) > MIXTURES // 2


def test_an_nccl_that_does_not_ask_what_to_read_anew_is_given_no_variable(tmp_path):
    wrong, graphs, buffers, _ = play(tmp_path, "2.30.7", 30, asks_no_cache=False)
    assert (wrong, buffers) == ([], 0)
    assert graphs > 0
