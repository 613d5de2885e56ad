"""Workloads from NCCL's logs."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tccl_py.errors import InputError
from tccl_py.workloads.nccl_log import read_nccl_logs
from tccl_py.workloads.recording import GRAPHS
from tccl_py.workloads.sources import open_workload, steady_run, workload_of
from tests.recorded_ranks import MADE, RankLog, calls_of


def read(logs, folder, *, cut=None):
    paths = []
    for log in logs:
        text = "".join(log.lines)
        path = folder / f"{len(paths)}.log"
        path.write_text(text if cut is None else text[: int(len(text) * cut)])
        paths.append(path)
    return workload_of(read_nccl_logs(paths), name="job", source="logs")


def logs_of(ranks, steps, step, **more):
    logs = [RankLog(rank, ranks, **more) for rank in range(ranks)]
    for log in logs:
        log.call("AllReduce", 1)
        log.call("Broadcast", 99)
    for log in logs:
        for _ in range(steps):
            step(log)
        log.call("AllReduce", 1)
    return logs


ALL = (0, 1, 2, 3)
BOTH = ("Send", "Recv")


@pytest.mark.parametrize("release", MADE)
def test_parts_of_a_communicator_are_told_in_the_log_of_each_release(release, tmp_path):
    logs = [RankLog(rank, 4, release=release) for rank in range(4)]
    for log in logs:
        pair = (0, 1) if log.rank < 2 else (2, 3)
        log.split("0x20", pair)
        log.split("0x30", (0, 2) if log.rank % 2 == 0 else (1, 3), number=2)
        for _ in range(4):
            log.call("AllReduce", 10, "0x20", dtype=9)
            log.call("AllGather", 10, "0x30")
    assert calls_of(read(logs, tmp_path)) == {
        **{("all_reduce", "bfloat16", 20, pair): 1 for pair in ((0, 1), (2, 3))},
        **{("all_gather", "int8", 80, pair): 1 for pair in ((0, 2), (1, 3))},
    }


@pytest.mark.parametrize(("frozen", "notices"), [(True, (GRAPHS,)), (False, ())])
def test_steady_steps_alone_are_counted(frozen, notices, tmp_path):
    def step(log):
        for _ in range(3):
            log.call("AllReduce", 1000)
        log.call("ReduceScatter", 10, dtype=9)

    workload = read(logs_of(4, 7, step, frozen=frozen), tmp_path)
    assert (workload.ranks, workload.steps, workload.notices) == (4, 7, notices)
    assert calls_of(workload) == {
        ("all_reduce", "float32", 4000, ALL): 3,
        ("reduce_scatter", "bfloat16", 80, ALL): 1,
    }


def test_a_group_with_every_rank_is_one_all_to_all_with_the_bytes_of_its_largest_rank(tmp_path):
    def step(log):
        to = [("Send", 10 * (log.rank + 1), peer) for peer in range(4)]
        of = [("Recv", 10 * (peer + 1), peer) for peer in range(4)]
        log.group([call for pair in zip(to, of, strict=True) for call in pair])

    assert calls_of(read(logs_of(4, 5, step), tmp_path)) == {("all_to_all", "int8", 640, ALL): 1}


def test_an_exchange_with_neighbours_is_one_call_and_a_pipeline_sends(tmp_path):
    def step(log):
        log.group([("Send", 5, (log.rank + 1) % 4), ("Recv", 5, (log.rank - 1) % 4)])
        if log.rank < 3:
            log.call("Send", 8, root=log.rank + 1)
        if log.rank > 0:
            log.call("Recv", 8, root=log.rank - 1)

    assert calls_of(read(logs_of(4, 5, step), tmp_path)) == {
        ("send_recv", "int8", 20, ALL): 1,
        **{("send", "int8", 32, (at, at + 1)): 1 for at in range(3)},
    }


def test_gathers_to_a_root_are_sends(tmp_path):
    workload = read(logs_of(4, 5, lambda log: log.call("Gather", 4, root=3)), tmp_path)
    assert calls_of(workload) == {("send", "int8", 16, (at, 3)): 1 for at in range(3)}


def test_ranks_of_several_hosts_that_no_communicator_joins_are_numbered_by_host(tmp_path):
    logs = []
    for host in ("b", "a"):
        for rank in range(2):
            logs.append(RankLog(rank, 2, host=host))
            logs[-1].lines[0] = logs[-1].lines[0].replace("0xfeed", f"0x{host}")
            for _ in range(4):
                logs[-1].call("AllReduce", 3)
    workload = read(logs, tmp_path)
    assert [row.groups for row in workload.rows] == [((2, 3), (0, 1))]
    assert "host" in workload.notices[0]


def test_ranks_of_two_hosts_are_joined_in_any_order_of_files_and_lines(tmp_path):
    def step(log):
        log.call("AllReduce", 10)
        log.call("Broadcast", log.rank // 2 + 1, "0x20")

    logs = [RankLog(rank, 4, host=f"host{rank % 2}") for rank in range(4)]
    for log in logs:
        log.split("0x20", (0, 1) if log.rank < 2 else (2, 3))
        for _ in range(6):
            step(log)
    expected = read(logs, tmp_path)
    assert calls_of(expected)["broadcast", "int8", 8, (2, 3)] == 1
    assert replace(read(logs[::-1], tmp_path), rows=()) == replace(expected, rows=())
    assert calls_of(read(logs[::-1], tmp_path)) == calls_of(expected)
    mixed = RankLog(0, 4)
    mixed.lines = [
        line for lines in zip(*(log.lines for log in logs), strict=True) for line in lines
    ]
    assert calls_of(read([mixed], tmp_path)) == calls_of(expected)


def test_calls_on_streams_of_their_own_are_told(tmp_path):
    def step(log):
        log.call("AllReduce", 3)
        log.call("AllReduce", 4, stream="0x77")

    rows = read(logs_of(4, 5, step), tmp_path).rows
    assert [(row.bytes, row.stream) for row in rows] == [(12, 0), (16, 1)]


def test_a_log_without_repetition_is_one_step_and_replays_are_said_to_be_missing(tmp_path):
    logs = [RankLog(rank, 2, frozen=True) for rank in range(2)]
    for log in logs:
        for layer in range(6):
            log.call("AllReduce", 10 + layer)
    workload = read(logs, tmp_path)
    assert (workload.steps, len(workload.rows)) == (0, 6)
    assert "replayed" in workload.notices[0] and "repetition" in workload.notices[1]


@pytest.mark.parametrize(("captured", "replays"), [(0, 0), (1, 1), (1, 5), (3, 1), (3, 7)])
def test_replays_are_counted_where_nccl_counts_operations(captured, replays, tmp_path):
    logs = [RankLog(rank, 2) for rank in range(2)]
    for log in logs:
        for _ in range(5):
            log.call("AllReduce", 10)
        for _ in range(captured):
            log.call("AllReduce", 20, same=True)
        log.counts["0x10"] += captured * replays
        log.group([("Send", 5, 1 - log.rank), ("Recv", 5, 1 - log.rank)])
        log.call("AllReduce", 10)
    notices = read(logs, tmp_path).notices
    more = captured * replays - 1
    if more > 0 and captured == 1:
        assert f"{more} operations" in notices[0]
    # One call that ran once is what any call is.
    assert bool(notices) == (captured > 0 and (captured, replays) != (1, 1))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("all_to_alls", [0, 2])
def test_groups_are_told_also_where_nccls_count_of_operations_stays(frozen, all_to_alls, tmp_path):
    def step(log):
        half = 4 if log.rank < 4 else -4
        log.call("Send" if half > 0 else "Recv", 8, root=log.rank + half)
        log.group([("Recv", 5, (log.rank - 1) % 8), ("Send", 5, (log.rank + 1) % 8)])
        log.call("Recv" if half > 0 else "Send", 8, root=log.rank + half)
        for _ in range(all_to_alls):
            blocks = [(name, 6, peer) for peer in range(8) for name in ("Send", "Recv")]
            log.group(blocks)

    assert calls_of(read(logs_of(8, 5, step, frozen=frozen), tmp_path)) == {
        **{("send", "int8", 32, (at, (at + 4) % 8)): 1 for at in range(8)},
        ("send_recv", "int8", 20, tuple(range(8))): 1,
        **{("all_to_all", "int8", 192, tuple(range(8))): 2 for _ in range(all_to_alls)},
    }


def test_steps_of_changing_sizes_are_told_and_averaged(tmp_path):
    sizes = random.Random(1).choices(range(100, 200), k=40)

    def step(log):
        log.call("AllReduce", sizes[len(log.lines) // 2 % 40])
        log.call("AllGather", 7)

    workload = read(logs_of(2, 40, step), tmp_path)
    total = Counter()
    for row in workload.rows:
        total[row.collective] += row.calls
    assert workload.steps >= 39
    assert total["all_gather"] == 1 and total["all_reduce"] == pytest.approx(1)


def test_files_that_miss_ranks_or_communicators_are_refused_in_one_sentence(tmp_path):
    logs = logs_of(4, 5, lambda log: log.call("AllReduce", 5))
    with pytest.raises(InputError, match="3 of the 4 ranks"):
        read(logs[:3], tmp_path)
    for log in logs:
        del log.lines[0]
    with pytest.raises(InputError, match="creation"):
        read(logs, tmp_path)


@given(st.lists(st.binary(max_size=40), max_size=8), st.floats(0, 1))
def test_a_cut_or_hostile_log_is_read_or_refused(tmp_path_factory, lines, cut):
    folder = tmp_path_factory.mktemp("hostile")
    log = RankLog(0, 2)
    log.call("AllReduce", 5)
    content = b"".join(
        part
        for pair in zip(map(str.encode, log.lines), [*lines, b"", b""], strict=False)
        for part in pair
    )
    path = folder / "0.log"
    path.write_bytes(content[: int(len(content) * cut)])
    with pytest.raises(InputError) as refused:
        open_workload([str(path)])
    assert "\n" not in str(refused.value)


def test_a_cut_log_of_one_rank_leaves_a_workload_with_a_notice(tmp_path):
    logs = logs_of(2, 30, lambda log: log.call("AllReduce", len(log.lines) % 3 + 1))
    logs[1].lines = logs[1].lines[:20]
    assert read(logs, tmp_path).steps > 0


@pytest.mark.parametrize("name", ["AlltoAll", "AllReduce"])
def test_a_rank_without_calls_is_a_rank_of_its_communicator(name, tmp_path):
    logs = [RankLog(rank, 3) for rank in range(3)] + [RankLog(rank, 2) for rank in range(2)]
    for number, log in enumerate(logs):
        if number > 2:
            log.where = log.where.replace("node", "other")
            text = "".join(log.lines).replace("node", "other").replace("feed", "f00d")
            log.lines = [text]
        for _ in range(5 * (number != 2)):
            log.call(name, 100)
    workload = read(logs, tmp_path)
    assert workload.ranks == 5
    assert {group for row in workload.rows for group in row.groups} == {(0, 1, 2), (3, 4)}


def test_all_to_alls_of_unequal_blocks_on_two_communicators_have_their_largest_ranks(tmp_path):
    def step(log):
        log.call("AllReduce", 7)
        for comm, peers in (("0x10", 4), ("0x20", 2)):
            blocks = [(name, log.rank + 1, peer) for peer in range(peers) for name in BOTH]
            log.group(blocks, comm)

    logs = [RankLog(rank, 4) for rank in range(4)]
    for log in logs:
        log.split("0x20", (0, 1) if log.rank < 2 else (2, 3))
        # Numbers of streams differ by rank, so no rank has a call like the largest rank's.
        log.call("AllReduce", 1, stream=f"0x{5 + log.rank // 2}")
        for _ in range(5):
            step(log)
    sizes = {key[-1]: key[2] for key in calls_of(read(logs, tmp_path)) if key[0] == "all_to_all"}
    assert sizes == {ALL: 4 * 4 * 4, (0, 1): 2 * 2 * 4, (2, 3): 2 * 4 * 4}


@pytest.mark.parametrize(
    "call",
    [
        {"name": "AllReduce", "count": 10**17},
        {"name": "Send", "count": 5, "root": 7},
        {"name": "Send", "count": 5, "root": -1},
        {"name": "Gather", "count": 5, "root": 9},
        {"name": "Gather", "count": 5, "root": -3},
    ],
)
def test_calls_that_cannot_be_are_refused(call, tmp_path):
    logs = logs_of(2, 5, lambda log: log.call(**call))
    with pytest.raises(InputError, match="unchanged"):
        read(logs, tmp_path)


def test_calls_of_a_datatype_that_is_not_known_are_left_out_by_its_number(tmp_path):
    def step(log):
        log.call("AllReduce", 1000)
        log.call("AllGather", 1000, dtype=77)

    notices = read(logs_of(2, 6, step), tmp_path).notices
    assert "12 calls of AllGather of the unknown datatype 77 left out." in notices


def test_a_line_without_end_is_not_held(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    with pytest.raises(InputError, match="no calls"):
        open_workload([str(path)])


def test_long_lines_of_other_output_are_passed_over(tmp_path):
    """Progress bars end no line: looking for calls at each of their characters would take hours."""
    logs = logs_of(2, 6, lambda log: log.call("AllReduce", 1000))
    expected = read(logs, tmp_path)
    for log in logs:
        log.lines.insert(0, "step 1 of 9\r" * 100_000 + "\n")
    assert read(logs, tmp_path).rows == expected.rows


@given(
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(st.integers(4, 7), min_size=1, max_size=6),
    st.integers(9, 12),
    st.lists(st.integers(8, 9), max_size=4),
)
def test_the_steady_run_is_found_between_a_warm_up_and_an_end(before, step, times, after):
    calls = np.array([*before, *step * times, *after], np.uint32)
    run = steady_run(calls)
    whole = len(step) * times
    assert run is not None
    assert len(step) % run.period == 0
    assert len(before) <= run.start and run.stop <= len(before) + whole
    assert run.steps * run.period > whole - len(step)


def test_a_last_line_without_its_end_does_not_count_wherever_it_is_cut(tmp_path):
    logs = [RankLog(rank, 2) for rank in range(2)]
    for log in logs:
        for count in (7, 1234567):
            log.call("AllReduce", count, buffer="0x1")
    whole = {("all_reduce", "float32", 4 * n, (0, 1)): 1.0 for n in (7, 1234567)}
    assert calls_of(read(logs, tmp_path)) == whole
    lasts = [log.lines.pop() for log in logs]
    without = calls_of(read(logs, tmp_path))
    assert without == {("all_reduce", "float32", 28, (0, 1)): 1.0}
    for at in range(1, len(lasts[0])):
        for log, last in zip(logs, lasts, strict=True):
            log.lines.append(last[:at])
        assert calls_of(read(logs, tmp_path)) == without
        for log in logs:
            log.lines.pop()


def test_groups_of_a_row_share_no_rank_and_a_rank_alone_communicates_nothing(tmp_path):
    logs, groups = [RankLog(rank, 3) for rank in range(3)], ((0, 1), (1, 2), (0, 2), (1,))
    for log in logs:
        for number, group in enumerate(groups):
            if log.rank in group:
                log.split(f"0x{number + 2}0", group, number=number + 1)
        for _ in range(4):
            for number, group in enumerate(groups):
                if log.rank in group:
                    log.call("AllReduce", 10, f"0x{number + 2}0")
    workload = read(logs, tmp_path)
    assert calls_of(workload) == {("all_reduce", "float32", 40, g): 1 for g in groups[:3]}
    assert all(len(set(sum(row.groups, ()))) == len(sum(row.groups, ())) for row in workload.rows)


def test_a_rank_that_two_processes_have_is_no_job(tmp_path):
    logs = [RankLog(rank, 2) for rank in (0, 1)] + [RankLog(1, 2, host="other")]
    for log in logs:
        log.call("AllReduce", 10)
    with pytest.raises(InputError, match="rank 1 of 2 is there twice"):
        read(logs, tmp_path)
