"""Machines of which a job sees some GPUs only."""

import pytest

from tccl_py.errors import InputError
from tccl_py.model.machine import check, check_knowledge
from tccl_py.readers.live import only_gpus, visible_indices
from tccl_py.simulator.descriptions import load_bundled
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
