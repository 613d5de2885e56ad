"""No mixture of ranks is given unlike variables or files: such a communicator would hang."""

import subprocess
import sys

import msgspec
import pytest

from tccl_py.nccl.plugin.index import plugin_environment
from tests.plugin.mixtures import Spec, draw, settings_of
from tests.plugin.programs import RECORDS, StandIn, stand_in_plan
from tests.plugin.runs import ROOT

MIXTURES = 150


def indices(folder, version):
    """Make the plans of mixtures: of all GPUs, the same with other rings, and of four GPUs."""
    needed, given = plugin_environment(settings_of(version))
    fields = {"needed": needed, "given": given, "forbid": ("NCCL_CROSS_NIC",)}
    whole = stand_in_plan(folder / "whole", **fields, sizes=(2, 4, 8))
    other = stand_in_plan(folder / "other", **fields, sizes=(2, 8), missing=[(0, 1)])
    part = stand_in_plan(folder / "part", **fields, sizes=(2, 4), gpus=4)
    paths = {"whole": whole.index, "other": other.index, "part": part.index}
    return {name: str(path) for name, path in paths.items()} | {"missing": "/nowhere/plugin.index"}


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_ranks_of_any_mixture_are_given_the_same(tmp_path, version):
    standin = StandIn(tmp_path)
    spec = Spec(
        mixtures=[draw(seed, version) for seed in range(MIXTURES)],
        indices=indices(tmp_path, version),
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
