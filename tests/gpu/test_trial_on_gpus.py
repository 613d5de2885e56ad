"""The trial of the plugin with a later NCCL, which needs GPUs that nothing else uses."""

from pathlib import Path

import msgspec
import pytest

from tccl_py.delivery.plugin import plugin_exports
from tccl_py.installation.install import communicators, try_plugin
from tccl_py.nccl.plugin.index import read_index
from tccl_py.plan.retuning import retune
from tests.gpu.ranks import REAL, torch_nccl
from tests.gpu.test_plugin_on_gpus import install, planned  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(150)]


def test_a_trial_as_with_a_later_nccl_goes_well_with_this_one(planned, tmp_path):  # noqa: F811
    """A pair gains nothing, and from NCCL 2.30 on the other sets get variables of their own."""
    size, plan, fingerprint = planned
    replace, version = msgspec.structs.replace, torch_nccl()
    if version >= (2, 30):
        plan = retune(plan, replace(plan.settings, buffsize=131072, min_channels=4))
    subsets = [replace(one, gains=one.gpus != (0, 1)) for one in plan.subsets]
    plan = replace(plan, subsets=tuple(subsets))
    install(tmp_path / "plan", plan, fingerprint)
    variables = plugin_exports(plan, tmp_path / "plan")
    index = read_index(Path(variables["TCCL_INDEX"]))
    assert bool(index.given) == (version >= (2, 30))
    assert ((0, 1) in index.sets) == (size == 2)
    if not REAL:
        variables |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    name = ".".join(map(str, version))
    assert try_plugin(variables, name) == name
    print(f"{size} GPUs, NCCL {name}: {communicators(index)}, {dict(index.given)}")
