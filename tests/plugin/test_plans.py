"""Plans that `tccl` writes reach communicators by the plugin."""

import shutil

import pytest

from tccl_py.delivery.plugin import plugin_exports
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.simulator.descriptions import load_bundled
from tests.planned import ASUS, as_only, needing_a_graph, plan_of
from tests.plugin.logs import assert_own_rings
from tests.plugin.runs import needs_release, plugin_library, run_ranks

pytestmark = pytest.mark.gpu(count=8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A simulated plan of eight GPUs, with the library beside it."""
    place = tmp_path_factory.mktemp("plans") / "asus"
    place.mkdir()
    write_plan(needing_a_graph(plan_of(ASUS)), place, models=as_only(load_bundled(ASUS)))
    shutil.copy(plugin_library(), place / "nccl")
    return place


@pytest.mark.parametrize(("version", "scenario"), [("2.28.9", "many"), ("2.30.7", "few")])
def test_communicators_run_the_rings_that_were_planned_for_their_gpus(
    directory, tmp_path, version, scenario
):
    needs_release(version)
    env = plugin_exports(load_plan(directory), directory)
    result = run_ranks(tmp_path / "run", scenario, 4, plan=None, version=version, env=env)
    assert result.errors == [] and set(result.codes.values()) == {0}
    logs = [(tmp_path / "run" / f"log.{rank}").read_text() for rank in range(4)]
    counts = assert_own_rings(needing_a_graph(plan_of(ASUS)), logs)
    assert counts[tuple(range(4))] == (2 if scenario == "many" else 1)
    assert {(0, 1), (2, 3)} <= counts.keys()
    # Pairs of the other kind.
    assert scenario == "few" or {(0, 2), (1, 3), (0, 1, 2)} <= counts.keys()
    assert "NCCL_P2P_LEVEL set by environment to SYS" in logs[0]
