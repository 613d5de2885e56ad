"""Requests for plans as values: made in Python, they plan what `tccl plan` plans."""

from contextlib import ExitStack

import msgspec
import numpy as np
import pytest

from tccl_py.errors import InputError
from tccl_py.plan.load import load_plan
from tccl_py.planning.opening import machine_subject
from tccl_py.planning.opening_hosts import cluster_subject
from tccl_py.planning.planner import make_plan
from tccl_py.planning.request import PlanRequest
from tccl_py.search.problem import Budget
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.commands import tccl


@pytest.mark.parametrize("options", [(), ("--nodes", "2")])
def test_a_request_made_in_python_plans_what_the_command_plans(options, tmp_path):
    name = "nvswitch-8gpu-8nic" if options else "h200x4-vm"
    place = tmp_path / "plan"
    words = ["plan", str(place), "--simulate", name, "--rings", "1", "--max-sets", "8", *options]
    assert tccl(*words).exit_code == 0
    budget = Budget(sets=8, idle_sets=100)
    request = PlanRequest(simulate=name, ring_counts=(1,), budget=budget)
    if options:
        request = msgspec.structs.replace(request, nodes=2)
    with ExitStack() as stack:
        several = cluster_subject, (request, None, stack, pytest.fail)
        open_all, of = several if options else (machine_subject, (request, pytest.fail))
        subject = open_all(*of)
        assert subject.search() == load_plan(place)
    assert bool(subject.table_files()) == bool(options)


def test_a_request_is_checked_when_it_is_made_and_does_not_change():
    with pytest.raises(InputError, match="target"):
        PlanRequest(target=2.0)
    with pytest.raises(AttributeError):
        PlanRequest().nodes = 2


def test_a_host_of_one_rank_is_told_that_a_ring_joins_two_gpus(tmp_path):
    words = ["plan", str(tmp_path / "plan"), "--simulate", "amd-3090", "--hosts", "solo:1"]
    result = tccl(*words)
    assert result.exit_code == 2
    assert "host solo: has 1 GPU to plan for; a ring joins 2 or more" in result.output


def test_numbers_of_rings_may_come_as_an_array_and_are_checked_like_a_list():
    model = load_bundled("h200x4-vm")
    parts = model.machine, model.knowledge, Simulator(model)
    for wrong in (np.array([1.5, 2.5]), [1.5, 2.5]):
        with pytest.raises(InputError, match="ring_counts"):
            make_plan(*parts, ring_counts=wrong)
