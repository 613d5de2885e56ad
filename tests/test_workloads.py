"""Workloads as data and as files."""

import subprocess
import sys
from typing import get_args

import msgspec
import pytest
from msgspec.structs import replace

from tccl_py.errors import InputError
from tccl_py.experiments.spec import Collective
from tccl_py.workloads.sources import open_workload
from tccl_py.workloads.workload import (
    BUNDLED,
    Workload,
    WorkloadCollective,
    WorkloadRow,
    load_bundled,
    read_workload,
    write_workload,
)
from tests.commands import tccl

ROW = WorkloadRow(
    collective="all_reduce", dtype="bfloat16", bytes=1 << 20, groups=((0, 1), (2, 3)), calls=4
)
WORKLOAD = Workload(name="job", source="a test", ranks=4, rows=(ROW,))


def test_a_workload_names_every_collective_of_the_experiments():
    assert set(get_args(WorkloadCollective)) == {*get_args(Collective), "send"}


def test_a_written_workload_is_read_as_it_was(tmp_path):
    write_workload(WORKLOAD, tmp_path / "job.json")
    assert read_workload(tmp_path / "job.json") == WORKLOAD


@pytest.mark.parametrize("target", ["/dev/null", "job.json"])
def test_a_link_that_a_workload_is_written_to_stays(target, tmp_path):
    (link := tmp_path / "link").symlink_to(target)
    write_workload(WORKLOAD, link)
    assert link.is_symlink()
    assert target == "/dev/null" or read_workload(tmp_path / target) == WORKLOAD


def test_a_pipe_gets_a_workload(tmp_path):
    (link := tmp_path / "link").symlink_to("/proc/self/fd/1")
    command = [sys.executable, "-m", "tccl_py", "workload", "fsdp", "--quiet", "-o", str(link)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    (tmp_path / "job.json").write_bytes(printed[: printed.rindex(b"}") + 1])
    assert read_workload(tmp_path / "job.json").rows == load_bundled("fsdp", 8).rows


WRONG = [
    b"",
    b"{}",
    b"[" * 100_000,
    b"\xff",
    msgspec.json.encode(WORKLOAD)[:-20],
    *(
        msgspec.json.encode(replace(WORKLOAD, rows=(ROW, replace(ROW, **change))))
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
    msgspec.json.encode(replace(WORKLOAD, format_version=2)),
]


def test_a_workload_may_begin_with_any_of_its_fields(tmp_path):
    path = tmp_path / "job.json"
    fields = msgspec.to_builtins(WORKLOAD)
    path.write_bytes(msgspec.json.encode(dict(reversed(fields.items()))))
    assert open_workload([str(path)]) == WORKLOAD


def test_a_workload_beside_other_files_is_named(tmp_path):
    for name in ("a.json", "b.json"):
        write_workload(WORKLOAD, tmp_path / name)
    with pytest.raises(InputError, match=r"a\.json: is neither a log nor a trace"):
        open_workload([str(tmp_path)])


@pytest.mark.parametrize("content", WRONG)
def test_a_file_that_is_no_workload_is_one_sentence_about_the_file(content, tmp_path):
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_workload(path)
    assert str(path) in refused.value.where
    assert "this program wrote" not in refused.value.right


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_bundled_workload_is_for_any_number_of_ranks(name, ranks, tmp_path):
    workload = load_bundled(name, ranks)
    write_workload(workload, tmp_path / "it.json")
    assert read_workload(tmp_path / "it.json") == workload
    assert workload.source.startswith("formula") and workload.ranks == ranks


def bytes_of(name, collective, ranks=8):
    rows = load_bundled(name, ranks).rows
    return sum(
        row.bytes * row.calls * len(row.groups) for row in rows if row.collective == collective
    )


def test_bundled_workloads_have_the_parameters_that_their_papers_state():
    # GPT-2 XL has 1.558 billion, Llama 3 8B 8.03 billion.
    assert bytes_of("data-parallel", "all_reduce") == 4 * 1_557_611_200
    assert bytes_of("fsdp", "reduce_scatter") == pytest.approx(4 * 8_030_261_248, rel=1e-6)
    # Mixtral has 46.7 billion, of which the experts' are 32 x 8 x 3 x 4096 x 14336.
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = bytes_of("mixture-of-experts", "all_reduce") / 2
    assert dense + experts == pytest.approx(46_702_792_704, rel=1e-6)
    # Seven boundaries of eight stages, both ways, 32 microbatches of 64 MiB.
    assert bytes_of("pipeline", "send") == 7 * 2 * 32 * (64 << 20)
    assert bytes_of("tensor-parallel-prefill", "all_reduce") == 160 * (32 << 20)


def test_groups_of_unlike_sizes_are_shown_with_their_sizes(tmp_path):
    row = replace(ROW, groups=((0, 1), (2, 3, 4), (5, 6)))
    write_workload(replace(WORKLOAD, ranks=7, rows=(row,)), tmp_path / "job.json")
    shown = tccl("workload", str(tmp_path / "job.json"))
    assert "2 x 2 ranks, 1 x 3 ranks" in shown.stdout
