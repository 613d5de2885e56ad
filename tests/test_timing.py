"""Timing of calls on GPUs, by a stand-in for torch.cuda whose clock is advanced by calls alone."""

import inspect
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from tccl_py.experiments.calls import (
    GRAPH_CALLS,
    GRAPHED_BYTES,
    stopwatch,
    time_calls,
    timed_batch,
    warm_up,
)
from tccl_py.rank_processes.rank import Communicator
from tccl_py.rank_processes.training import TrainingStep
from tests.skips import mark_needs

needs_torch = mark_needs("torch")
SMALL, LARGE = 1024, 2 * GRAPHED_BYTES


class FakeGpu:
    """The parts of torch, torch.cuda and torch.distributed that timing uses, of one rank.

    `launch` takes time when it runs, and none when it is captured; `graphs` are all CUDA graphs.
    """

    def __init__(self):
        gpu, self.now, self.graphs, self.capturing, self.launched = self, 0.0, [], None, 0
        self.streams = 0

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing
                self.at = None

            def record(self):
                self.at = gpu.now

            def elapsed_time(self, end_event):
                return (end_event.at - self.at) * 1e3

        class CUDAGraph:
            def __init__(self):
                self.seconds, self.calls, self.replays, self.alive = 0.0, 0, 0, True
                gpu.graphs.append(self)

            def replay(self):
                assert self.alive and gpu.capturing is None
                self.replays += 1
                gpu.now += self.seconds

            def reset(self):
                self.alive = False

        @contextmanager
        def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
            assert capture_error_mode == "thread_local"
            gpu.capturing = cuda_graph
            yield
            gpu.capturing = None

        class Stream:
            def __init__(self):
                gpu.streams += 1

            def wait_event(self, event):
                assert event.at is not None

        cuda = SimpleNamespace(
            Event=Event, CUDAGraph=CUDAGraph, Stream=Stream, graph=graph, stream=nullcontext,
            synchronize=id,
        )  # fmt: skip
        self.cuda, self.float64, self.bfloat16, self.empty_like = cuda, "float64", "bfloat16", id

    def launch(self, seconds):
        """Run a kernel, or capture it."""
        self.launched += 1
        if self.capturing is None:
            self.now += seconds
        else:
            self.capturing.calls += 1
            self.capturing.seconds += seconds

    def tensor(self, values, dtype, device):
        return SimpleNamespace(tolist=lambda: values)

    def ones(self, shape, dtype, device):
        return 1.0

    def mm(self, left, right, out):
        self.launch(1e-3)

    @property
    def communicator(self):
        operations = SimpleNamespace(MAX="max")
        dist = SimpleNamespace(
            get_backend=lambda: "nccl",
            barrier=lambda: None,
            all_reduce=lambda *_, **__: None,
            ReduceOp=operations,
        )
        device = SimpleNamespace(type="cuda")
        return Communicator(torch=self, dist=dist, rank=0, members=(0,), device=device)


@pytest.fixture
def gpu():
    return FakeGpu()


def test_events_time_the_calls_without_the_lead(gpu):
    taken = time_calls(gpu.communicator, lambda: gpu.launch(1.0), lambda: gpu.launch(0.25))
    assert taken == pytest.approx(0.25)


def test_small_calls_are_replayed_from_one_graph_that_the_stack_frees(gpu):
    with ExitStack() as stack:
        batch = timed_batch(gpu.communicator, lambda: gpu.launch(2e-6), SMALL, 1e-3, stack)
        before = gpu.launched
        assert [batch(), batch()] == pytest.approx([2e-6, 2e-6])
        (graph,) = gpu.graphs
        assert (graph.calls, graph.alive, gpu.launched) == (GRAPH_CALLS, True, before)
        # Replays fill the batch: 50 calls of 2 us in 1 ms, and each batch has a lead.
        replays = graph.replays
        batch()
        assert graph.replays - replays == 11
    assert not graph.alive


def test_without_a_stack_each_batch_captures_a_graph_of_its_own_and_frees_it(gpu):
    batch = timed_batch(gpu.communicator, lambda: gpu.launch(2e-6), SMALL, 1e-4, None)
    assert [batch(), batch(), batch()] == pytest.approx([2e-6] * 3)
    assert [graph.alive for graph in gpu.graphs] == [False] * 3


@pytest.mark.parametrize(("size", "seconds"), [(LARGE, 1e-3), (SMALL, 0.5)])
def test_large_and_long_calls_are_timed_without_a_graph(gpu, size, seconds):
    with ExitStack() as stack:
        batch = timed_batch(gpu.communicator, lambda: gpu.launch(seconds), size, 0.1, stack)
        assert batch() == pytest.approx(seconds)
    assert gpu.graphs == []


def test_calls_begin_together_on_streams_of_their_own_that_are_made_once(gpu):
    begin = stopwatch(gpu.communicator)
    for count in (1, 2, 2):
        # The stand-in's only clock runs one call after the other.
        taken = begin([lambda: gpu.launch(0.5), lambda: gpu.launch(0.25)][:count])
        assert taken == pytest.approx((0.5, 0.75)[:count])
    assert gpu.streams == 2


def test_a_gpu_is_kept_busy_until_its_clocks_are_up(gpu):
    warm_up(gpu.communicator)
    assert gpu.launched > 0


@needs_torch
def test_the_stand_in_has_names_and_arguments_of_torch_alone(gpu):
    import torch  # noqa: PLC0415

    for name in ("Event", "CUDAGraph", "Stream"):
        own = [key for key in vars(getattr(gpu.cuda, name)) if not key.startswith("__")]
        assert own and [key for key in own if not hasattr(getattr(torch.cuda, name), key)] == []
    arguments = set(inspect.signature(torch.cuda.graph).parameters)
    assert set(inspect.signature(gpu.cuda.graph).parameters) <= arguments
    assert callable(torch.cuda.synchronize)


@needs_torch
def test_training_values_are_those_of_the_first_weights_however_many_steps_ran():
    import torch  # noqa: PLC0415

    device = torch.device("cpu")
    alone = SimpleNamespace(all_reduce=lambda *_, **__: None)
    whole, half = (
        Communicator(torch=torch, dist=alone, rank=0, members=members, device=device)
        for members in ((0,), (0, 1))
    )
    step = TrainingStep(whole, half)
    values = step.values(step)
    for _ in range(10):
        step()
    assert step.values(step) == values
    step()
    assert step.values(lambda: None) != values
