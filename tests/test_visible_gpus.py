"""Machines of which a job sees some GPUs only."""

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.model.machine import check, check_knowledge
from tccl_py.planning.opening import machine_subject
from tccl_py.planning.request import PlanRequest
from tccl_py.readers.live import only_gpus, visible_indices
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.sources import opening
from tccl_py.sources.profiled import measured_machine
from tests.sessions import PRINT
from tests.toy import toy_machine

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", "GPU-dddd-4")


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, (0, 1, 2, 3)),
        ("1", (1,)),
        (" 3 , 1", (1, 3)),
        ("2,7,1", (2,)),
        ("GPU-cccc,GPU-aaaa-1", (0, 2)),
        ("GPU-aa", None),
        ("", None),
        ("-1", None),
        ("0" * 100, None),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(text, indices):
    machine = toy_machine(gpus=4)
    if indices is not None:
        assert visible_indices(machine, UUIDS, text) == indices
        return
    with pytest.raises(InputError, match="no GPU here; there are 0, 1, 2, 3"):
        visible_indices(machine, UUIDS, text)


@pytest.mark.parametrize("name", ["h200x4-vm", "nvswitch-8gpu-8nic", "asus-esc8000a-e13p"])
def test_what_is_left_is_a_machine_with_knowledge_of_its_own_gpus(name):
    model = load_bundled(name)
    machine, knowledge = only_gpus(model.machine, model.knowledge, (1, 3))
    assert machine.gpu_indices == (1, 3)
    check(machine, where=name)
    check_knowledge(knowledge, machine, where=name)
    assert not {"G0", "G2"} & {end for one in machine.nvlinks for end in (one.source, one.target)}


@pytest.fixture
def host(monkeypatch):
    """This host has four GPUs: what is opened for a session, and what the user is told."""
    model, opened = load_bundled("h200x4-vm"), []
    print_ = msgspec.structs.replace(PRINT, gpu_uuids=UUIDS)
    found = (model.machine, model.knowledge, print_)
    monkeypatch.setattr("tccl_py.readers.live.discover_machine", lambda: found)
    monkeypatch.setattr(opening, "open_session", lambda _, gpus, __: opened.append(gpus))
    return opened


def told(gpus=None):
    notices = []
    machine_subject(PlanRequest(version="2.28", gpus=gpus), notices.append)
    return [text for text in notices if "CUDA_VISIBLE_DEVICES" in text]


def test_a_plan_is_for_the_gpus_that_are_visible_unless_others_are_named(host, monkeypatch):
    assert told() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert told() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-cccc-3")
    (notice,) = told()
    assert "GPUs 0,2 of 4" in notice
    assert told("2,3") == []
    assert host == [None, None, (0, 2), (2, 3)]


def test_one_visible_gpu_is_refused_by_the_name_of_the_variable(host, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES: shows GPU 1 alone"):
        told()


@pytest.mark.parametrize("text", ["", "NoDevFiles", "MIG-1"])
def test_what_shows_no_gpu_matters_only_where_none_are_named(host, monkeypatch, text):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert told("0,1") == []
    assert measured_machine().machine.gpu_indices == (0, 1, 2, 3)
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES"):
        told()
