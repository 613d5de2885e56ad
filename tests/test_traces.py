"""Workloads from traces of PyTorch's profiler."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.workloads.sources import open_workload
from tests.recorded_ranks import RankLog, calls_of

WORLD = [0, 1, 2, 3]


class Trace:
    """A rank's trace as kineto writes it."""

    def __init__(self, rank):
        self.rank, self.events, self.clock = rank, [], 0.0

    def event(self, name, kind="cpu_op", **args):
        self.clock += 1
        event = {"ph": "X", "cat": kind, "name": name, "ts": self.clock, "dur": 1, "args": args}
        self.events.append(event)

    def call(self, name, sent, received=None, *, ranks=WORLD, group="0", dtype="Float", **more):
        number = len(self.events)
        args = {
            "External id": number, "Collective name": name, "dtype": dtype,
            "In msg nelems": sent, "Out msg nelems": sent if received is None else received,
            "Group size": len(ranks), "Process Group Name": group,
            "Process Group Ranks": str(ranks), **more,
        }  # fmt: skip
        self.event("record_param_comms", **args)
        return number

    def write(self, folder, *, pack=True):
        info = {"backend": "nccl", "rank": self.rank, "world_size": 4}
        # Kineto sorts by thread, not by time.
        whole = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": self.events[::-1]}
        text = json.dumps(whole, indent=2).encode()
        path = folder / f"{self.rank}.json{'.gz' * pack}"
        path.write_bytes(gzip.compress(text) if pack else text)
        return path


def step(trace, number):
    rank = trace.rank
    pair = [0, 1] if rank < 2 else [2, 3]
    trace.event(f"ProfilerStep#{number}", "user_annotation")
    made = trace.call("allreduce", 100, dtype="BFloat16", **{"Process Group Ranks": WORLD})
    trace.event(
        "ncclDevKernel_AllReduce",
        "kernel",
        **{"External id": made, "stream": 7, "Collective name": "allreduce"},
    )
    trace.call("_allgather_base", 10, 20, ranks=pair, group=str(pair))
    trace.call("_reduce_scatter_base", 20, 10, ranks=pair, group=str(pair), dtype="Half")
    trace.call("all_to_allv", 4 * (rank + 1), 10)
    trace.call("wait", 0)
    if rank < 3:
        trace.call("send", 8, **{"Dst Rank": rank + 1})
    if rank > 0:
        trace.call("recv", 8, **{"Src Rank": rank - 1})
    trace.call("send", 5, **{"Dst Rank": (rank + 1) % 4})
    trace.call("recv", 5, **{"Src Rank": (rank - 1) % 4})
    trace.call("barrier", 0)


STEP = {
    ("all_reduce", "bfloat16", 200, (0, 1, 2, 3)): 1,
    **{("all_gather", "int8", 80, pair): 1 for pair in ((0, 1), (2, 3))},
    **{("reduce_scatter", "float16", 40, pair): 1 for pair in ((0, 1), (2, 3))},
    ("all_to_all", "int8", 64, (0, 1, 2, 3)): 1,
    **{("send", "int8", 32, (at, at + 1)): 1 for at in range(3)},
    ("send_recv", "int8", 20, (0, 1, 2, 3)): 1,
    ("all_reduce", "float32", 4, (0, 1, 2, 3)): 1,
}


def traces(folder, *, pack=True):
    paths = []
    for rank in range(4):
        trace = Trace(rank)
        for number in range(2):
            step(trace, number)
        paths.append(trace.write(folder, pack=pack))
    return paths


@pytest.mark.parametrize("pack", [True, False])
def test_calls_of_the_marked_steps_of_traces_are_counted(tmp_path, pack):
    traces(tmp_path, pack=pack)
    workload = open_workload([str(tmp_path)])
    assert calls_of(workload) == STEP
    assert (workload.ranks, workload.steps, workload.notices) == (4, 2, ())
    streams = {row.stream for row in workload.rows if row.bytes == 200}
    assert streams.isdisjoint(row.stream for row in workload.rows if row.bytes != 200)


def test_graph_launches_in_a_trace_are_named(tmp_path):
    for rank in range(4):
        trace = Trace(rank)
        step(trace, 1)
        trace.event("cudaGraphLaunch", "cuda_runtime")
        trace.write(tmp_path)
    assert "CUDA graphs were launched 4 times" in open_workload([str(tmp_path)]).notices[0]


def test_ranks_that_a_trace_leaves_out_follow_from_the_stride(tmp_path):
    for rank in range(0, 80, 2):
        trace = Trace(rank)
        trace.call("allreduce", 3, ranks=range(0, 80, 2))
        shown = "[0, 2, 4, ..., 78]"
        trace.events[-1]["args"] |= {
            "Process Group Ranks": shown,
            "Global rank start": 0,
            "Global rank stride": 2,
        }
        trace.write(tmp_path)
    (row,) = open_workload([str(tmp_path)]).rows
    assert row.groups == (tuple(range(0, 80, 2)),)


@given(
    st.floats(0.001, 0.999),
    st.booleans(),
    st.sampled_from(["distributedInfo", '"ts": ', '"Group size"']),
)
def test_a_cut_or_hostile_trace_is_refused_in_one_sentence(tmp_path_factory, cut, pack, word):
    folder = tmp_path_factory.mktemp("cut")
    paths = traces(folder, pack=pack)
    whole = paths[0].read_bytes()
    end = int(len(whole) * cut)
    paths[0].write_bytes(whole[:end] if pack or end % 2 else whole.replace(word.encode(), b'"nan'))
    with pytest.raises(InputError) as refused:
        open_workload([str(folder)])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("allreduce", {"In msg nelems": float("inf")}),
        ("allreduce", {"In msg nelems": -5, "Out msg nelems": -5}),
        ("allreduce", {"In msg nelems": 10**4299}),
        ("allreduce", {"Group size": float("inf")}),
        ("send", {"Dst Rank": float("inf")}),
        ("send", {"Dst Rank": 1, "In msg nelems": -5}),
        ("gather", {"Rank": -3}),
        ("gather", {"Rank": float("inf")}),
    ],
)
def test_calls_of_a_trace_that_cannot_be_are_refused_in_one_sentence(name, values, tmp_path):
    for rank in range(4):
        trace = Trace(rank)
        trace.call(name, 8)
        trace.events[-1]["args"] |= values
        trace.write(tmp_path, pack=False)
    with pytest.raises(InputError) as refused:
        open_workload([str(tmp_path)])
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("rank", [-1, float("inf"), 10**30])
def test_a_trace_of_no_rank_is_refused(rank, tmp_path):
    Trace(rank).write(tmp_path, pack=False)
    with pytest.raises(InputError) as refused:
        open_workload([str(tmp_path)])
    assert "again" not in str(refused.value)


def test_events_nested_too_deep_are_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"distributedInfo": {"rank": 0}, "traceEvents": [' + "[" * 200_000)
    with pytest.raises(InputError):
        open_workload([str(path)])


def test_a_rank_with_fewer_calls_than_there_are_steps_is_no_part_of_them(tmp_path):
    for rank in range(4):
        log, pair = RankLog(rank, 4), (rank // 2 * 2, rank // 2 * 2 + 1)
        log.split("0x20", pair)
        for size in [1 << 20] * 8 if rank < 2 else [1 << 20, 1 << 21]:
            log.call("AllReduce" if rank < 2 else "AllGather", size, "0x20")
        (tmp_path / f"{rank}.log").write_text("".join(log.lines))
    workload = open_workload([str(tmp_path)])
    assert calls_of(workload) == {("all_reduce", "float32", 4 << 20, (0, 1)): 1}
    assert "4 calls of ranks with fewer calls than steps left out." in workload.notices


def test_files_of_two_kinds_are_not_one_job(tmp_path):
    traces(tmp_path)
    (tmp_path / "x.log").write_text("node:1:1 [0] NCCL INFO Bootstrap\n")
    with pytest.raises(InputError, match="NCCL's logs"):
        open_workload([str(tmp_path)])


ENDS = {0: {"Dst Rank": 2}, 2: {"Src Rank": 0}}
KINDS = st.sampled_from(["allreduce", "gather in pairs", "all_to_allv", "send", "exchange"])


def log_call(log, kind, count):
    """A call as NCCL logs it, within a host."""
    rank = log.rank
    after, before = (rank + 1) % 4, (rank - 1) % 4
    if kind == "allreduce":
        log.call("AllReduce", count)
    elif kind == "gather in pairs":
        log.call("AllGather", count, "0x20", dtype=9)
    elif kind == "all_to_allv":
        log.group([(name, count, peer) for peer in range(4) for name in ("Send", "Recv")])
    elif kind == "send" and rank % 2 == 0:
        log.call("Recv" if rank else "Send", count, root=2 - rank)
    elif kind == "exchange":
        log.group([("Send", count, after), ("Recv", count, before)])


def trace_call(trace, kind, count):
    """The same call as the profiler records it."""
    rank = trace.rank
    pair = [0, 1] if rank < 2 else [2, 3]
    if kind == "allreduce":
        trace.call("allreduce", count)
    elif kind == "gather in pairs":
        trace.call(
            "_allgather_base", count, 2 * count, ranks=pair, group=str(pair), dtype="BFloat16"
        )
    elif kind == "all_to_allv":
        trace.call("all_to_allv", 4 * count)
    elif kind == "send" and rank % 2 == 0:
        trace.call("recv" if rank else "send", count, **ENDS[rank])
    elif kind == "exchange":
        trace.call("send", count, **{"Dst Rank": (rank + 1) % 4})
        trace.call("recv", count, **{"Src Rank": (rank - 1) % 4})


@given(st.lists(st.tuples(KINDS, st.integers(1, 5)), min_size=1, max_size=6))
def test_a_log_and_a_trace_of_one_program_say_the_same(tmp_path_factory, program):
    folders = [tmp_path_factory.mktemp(name) for name in ("logs", "traces")]
    for rank in range(4):
        log, trace = RankLog(rank, 4, frozen=True), Trace(rank)
        log.split("0x20", (0, 1) if rank < 2 else (2, 3))
        for number in range(3):
            trace.event(f"ProfilerStep#{number}", "user_annotation")
            for kind, count in program:
                log_call(log, kind, count)
                trace_call(trace, kind, count)
        (folders[0] / f"{rank}.log").write_text("".join(log.lines))
        trace.write(folders[1])
    logged, traced = (open_workload([str(folder)]) for folder in folders)
    # A program may repeat itself within a step.
    steps = max(1, logged.steps) / (3 if logged.steps else 1)
    assert {call: count * steps for call, count in calls_of(logged).items()} == {
        call: count * (1 if logged.steps else 3) for call, count in calls_of(traced).items()
    }
