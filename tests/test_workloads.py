"""Workloads as data and as files."""

from typing import get_args

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.experiments.collectives import Collective
from tccl_py.workloads.workload import (
    Workload,
    WorkloadCollective,
    WorkloadRow,
    read_workload,
    write_workload,
)

ROW = WorkloadRow(
    collective="all_reduce", dtype="bfloat16", bytes=1 << 20, groups=((0, 1), (2, 3)), calls=4
)
WORKLOAD = Workload(name="job", source="a test", ranks=4, rows=(ROW,))


def test_a_workload_names_every_collective_of_the_experiments():
    assert set(get_args(WorkloadCollective)) == {*get_args(Collective), "send"}


def test_a_written_workload_is_read_as_it_was(tmp_path):
    write_workload(WORKLOAD, tmp_path / "job.json")
    assert read_workload(tmp_path / "job.json") == WORKLOAD


WRONG = [
    b"",
    b"{}",
    b"[" * 100_000,
    b"\xff",
    msgspec.json.encode(WORKLOAD)[:-20],
    *(
        msgspec.json.encode(
            msgspec.structs.replace(WORKLOAD, rows=(ROW, msgspec.structs.replace(ROW, **change)))
        )
        for change in (
            {"groups": ((0, 1), (1, 2))},
            {"groups": ((0, 4),)},
            {"groups": ()},
            {"bytes": -1},
            {"calls": 0},
            {"collective": "send", "groups": ((0, 1, 2),)},
            {"collective": "gossip"},
        )
    ),
    msgspec.json.encode(msgspec.structs.replace(WORKLOAD, format_version=2)),
]


@pytest.mark.parametrize("content", WRONG)
def test_a_file_that_is_no_workload_is_one_sentence_about_the_file(content, tmp_path):
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_workload(path)
    assert str(path) in refused.value.where
