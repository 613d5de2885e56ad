"""Rank program of a verification job: checks, timings and training; its result is a file.

usage: python -m tccl_py.experiments.rank SPEC.json RANK

Batches of collectives and training steps are timed by the device's or host's clock. Training is of
a small GPT, data parallel, or tensor parallel over neighbouring ranks. Its weights and data follow
from fixed seeds, so every arm has to find the same loss and gradients. A tensor-parallel GPT splits
heads and the hidden layer by columns, then by rows: each half of a block ends with an all-reduce,
and its gradient with another.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from tccl_py.experiments.calls import Call, graphed, row_call, run_checks, timed_batch, warm_up
from tccl_py.experiments.contests import time_contest
from tccl_py.experiments.spec import (
    PARALLEL,
    Contest,
    Groups,
    JobResult,
    JobSpec,
    Row,
    RowTimes,
    batches,
)
from tccl_py.experiments.together import time_beside
from tccl_py.nccl_library import loaded_nccl
from tccl_py.rank_processes.rank import (
    Communicator,
    TimeSlot,
    join,
    read_spec,
    slots_file,
    time_slots,
    write_result,
)

BATCHES = 9
TRAINING_SLOTS, TRAINING_STEPS = 4, 5
_WARM_STEPS = 12
"""DistributedDataParallel rebuilds its buckets early, and a CUDA graph needs 11 steps before it."""
_COMPARED_STEPS = 3
"""Steps from the first weights after which values are compared: sums in another order differ by
rounding, and training amplifies that. After 36 steps gradients of arms on two H200 differed by
0.6 %, and by 0.15 % between ranks of one job."""
_RATE = 0.01


def main() -> None:
    """Run the specification of the command line as rank RANK."""
    spec, rank, folder = read_spec(JobSpec)
    local_rank = rank - spec.first_rank
    communicator = join(
        "nccl" if spec.backend == "cuda" else "gloo",
        spec.rendezvous or folder,
        rank=rank,
        world=spec.world,
        local_rank=local_rank,
    )
    torch = communicator.torch
    result = JobResult(
        rank=rank,
        torch=str(torch.__version__),
        nccl=loaded_nccl(torch) if communicator.cuda else "",
        device=communicator.device_name,
    )

    @cache
    def over(groups: Groups) -> Communicator:
        return communicator.split(groups) if groups else communicator

    for groups in ((), *spec.check_groups) if spec.checks else ():
        if not groups or (_splits() and over(groups).world > 1):
            result = run_checks(over(groups), result)
    if spec.rows:
        warm_up(communicator)
        gc.freeze()  # torch may collect garbage before each capture
        slot = time_slots(slots_file(folder), spec.slot, local_rank)
        result = replace(result, times=tuple(_times(spec, communicator, over, slot)))
    write_result(folder, rank, result)
    # No rank leaves while another one communicates. Nothing is destroyed: with overlapping groups
    # of four GPUs and more torch 2.11 hangs then.
    communicator.wait()
    communicator.dist.barrier()
    communicator.wait()


def _times(
    spec: JobSpec,
    communicator: Communicator,
    over: Callable[[Groups], Communicator],
    slot: TimeSlot,
) -> Iterator[RowTimes]:
    """Yield the times of each row that begins before the limit."""
    begun, train = time.monotonic(), trainer(communicator, slot)
    for row in spec.rows:
        spent = time.monotonic() - begun
        if spec.limit is not None and communicator.maximum(spent) > spec.limit:
            return
        contest = row.contest
        if isinstance(contest, Contest):
            if contest.calls:
                yield time_beside(communicator, row, contest)
            else:
                yield time_contest(communicator, slot, row, contest)
        elif row.trains:
            yield train(row)
        elif row.groups and not _splits():
            _leave_slots(slot, 1 + BATCHES)
            yield batches(row, ())
        else:
            yield batches(row, _time_batches(over, row, spec.seconds, slot))


def _splits() -> bool:
    """Return whether ranks may form groups: a graph file fails communicators over fewer GPUs."""
    return "NCCL_GRAPH_FILE" not in os.environ


def _leave_slots(slot: TimeSlot, count: int) -> None:
    """Let the other jobs have time slots of a row that this one has no part in."""
    for _ in range(count):
        with slot():
            pass


def _time_batches(
    over: Callable[[Groups], Communicator], row: Row, seconds: float, slot: TimeSlot
) -> tuple[float, ...]:
    """Return the seconds per call of BATCHES batches that together take about `seconds`.

    The set-up and every batch have a time slot each. Ranks outside a row's communicator join the
    barriers of the whole job, and have no times.
    """
    with ExitStack() as stack:
        with slot():
            group = over(row.groups)
            call = row_call(group, row)
            batch = timed_batch(group, call, row.bytes, seconds / BATCHES, stack)
        times = []
        for _ in range(BATCHES):
            with slot():
                times.append(batch())
    return tuple(times) if group.world > 1 else ()


# Training steps.


class GptShape(NamedTuple):
    """Dimensions of a GPT and of a rank's batch."""

    layers: int = 2
    width: int = 32
    heads: int = 4
    context: int = 16
    vocabulary: int = 64
    batch: int = 2


ON_GPU = GptShape(layers=4, width=1536, heads=12, context=512, vocabulary=8192, batch=4)
"""500 MB of gradients, and 12 MB in each of 16 all-reduces of a tensor-parallel step."""


class TrainingStep:
    """Model, data and optimizer of a rank; a call is a step.

    `group` has the ranks over which the model is split; its `world` is 1 in data-parallel modes.
    """

    def __init__(self, communicator: Communicator, group: Communicator) -> None:
        torch, device = communicator.torch, communicator.device
        self._torch, self._group, self._parts = torch, group, group.world
        self._shape = ON_GPU if communicator.cuda else GptShape()
        torch.set_float32_matmul_precision("high")
        model = self._model(communicator.rank % self._parts)
        self._weights = list(model.parameters())
        self._first = [weight.detach().clone() for weight in self._weights]
        if self._parts == 1:
            devices = [device.index] if communicator.cuda else None
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=devices)
        self._run, self._loss = model, torch.zeros(())
        self._optimizer = torch.optim.SGD(self._weights, lr=_RATE)
        # Ranks of a split model share the data.
        data = torch.Generator(device).manual_seed(communicator.rank // self._parts)
        shape = (self._shape.batch, self._shape.context + 1)
        tokens = partial(torch.randint, self._shape.vocabulary, shape, generator=data)
        self._tokens = tokens(device=device)

    def __call__(self) -> None:
        """Run forward, backward and the update of the weights."""
        self._optimizer.zero_grad(set_to_none=False)
        self._loss = self._run(self._tokens)
        self._loss.backward()
        self._optimizer.step()

    def values(self, step: Call) -> tuple[float, ...]:
        """Run steps from the first weights, eagerly or as a CUDA graph.

        Return the last step's loss, and the gradients' norms of embeddings and of blocks.
        """
        with self._torch.no_grad():
            for weight, first in zip(self._weights, self._first, strict=True):
                weight.copy_(first)
        for _ in range(_COMPARED_STEPS):
            step()
        embeddings, blocks = (
            sum(float(weight.grad.double().square().sum()) for weight in weights) ** 0.5
            for weights in (self._weights[:2], self._weights[2:])
        )
        return float(self._loss.detach()), embeddings, blocks

    def _model(self, part: int) -> Any:
        """Return a GPT with this rank's part of all blocks' weights, and all of the embeddings."""
        torch, shape, parts = self._torch, self._shape, self._parts
        generator = torch.Generator(self._group.device).manual_seed(0)

        def weight(*size: int, split: int | None = None) -> Any:
            made = torch.randn(size, generator=generator, device=self._group.device) * 0.02
            part_of = made if split is None else made.chunk(parts, dim=split)[part].clone()
            return torch.nn.Parameter(part_of)

        width, loss = shape.width, self._forward
        weights = [weight(shape.vocabulary, width), weight(shape.context, width)]
        for _ in range(shape.layers):
            weights += [weight(3, width, width, split=1), weight(width, width, split=1)]
            weights += [weight(4 * width, width, split=0), weight(width, 4 * width, split=1)]

        class Gpt(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.weights = torch.nn.ParameterList(weights)

            def forward(self, tokens: Any) -> Any:
                return loss(list(self.weights), tokens)

        return Gpt()

    def _forward(self, weights: Sequence[Any], tokens: Any) -> Any:
        """Return the loss of predicting each next token."""
        functional = self._torch.nn.functional
        words, places, *blocks = weights
        width, heads = self._shape.width, self._shape.heads // self._parts
        state = functional.embedding(tokens[:, :-1], words) + places
        for at in range(0, len(blocks), 4):
            attend, mixed, up, down = blocks[at : at + 4]
            entered = self._entered(functional.layer_norm(state, (width,)))
            query, key, value = (
                functional.linear(entered, part).unflatten(2, (heads, -1)).transpose(1, 2)
                for part in attend
            )
            mean = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            state = state + self._left(functional.linear(mean.transpose(1, 2).flatten(2), mixed))
            entered = self._entered(functional.layer_norm(state, (width,)))
            hidden = functional.gelu(functional.linear(entered, up))
            state = state + self._left(functional.linear(hidden, down))
        logits = functional.linear(functional.layer_norm(state, (width,)), words)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _entered(self, state: Any) -> Any:
        """Return the input of split weights: its gradient is the sum over all parts."""
        if self._parts > 1:
            state.register_hook(self._total)
        return state

    def _left(self, state: Any) -> Any:
        """Return the sum of the outputs of all parts, whose gradient is every part's."""
        if self._parts == 1:
            return state
        detached = state.detach()
        # The difference is zero, and carries the gradient.
        return self._total(detached) + (state - detached)

    def _total(self, value: Any) -> Any:
        total = value.clone(memory_format=self._torch.contiguous_format)
        self._group.dist.all_reduce(total, group=self._group.group)
        return total


def trainer(communicator: Communicator, slot: TimeSlot) -> Callable[[Row], RowTimes]:
    """Return a function that times a training step, eager or as a CUDA graph.

    Times come with loss and gradients after a few steps. Rows of a model follow each other.
    """
    # Work that a graph replays must be made on another stream than the default one.
    stream = communicator.torch.cuda.Stream() if communicator.cuda else None
    world = communicator.world

    @lru_cache(maxsize=1)
    def step_of(parts: int) -> tuple[TrainingStep, tuple[float, ...]]:
        # All jobs make their models at the same time, which takes longer than the steps: an
        # empty slot before and after it keeps that away from timed work.
        _leave_slots(slot, 1)
        groups = [range(first, first + parts) for first in range(0, world, parts) if parts > 1]
        step = TrainingStep(communicator, communicator.split(groups))
        for _ in range(_WARM_STEPS):
            step()
        values = step.values(step)
        communicator.wait()
        _leave_slots(slot, 1)
        return step, values

    def train(row: Row) -> RowTimes:
        name, _, form = row.mode.partition("-")
        parts = PARALLEL[name]
        if not _splits() and parts not in (1, world):
            _leave_slots(slot, TRAINING_SLOTS + (1 if form == "graph" else 2))
            return batches(row, ())
        with ExitStack() as stack, communicator.torch.cuda.stream(stream):
            step, values = step_of(parts)
            call: Call = step
            if form == "graph":
                with slot():
                    communicator.wait()
                    call = stack.enter_context(graphed(communicator, step, stream=stream))
                    values = step.values(call)
            return batches(row, _time_steps(communicator, call, slot), values)

    return train


def _time_steps(communicator: Communicator, step: Call, slot: TimeSlot) -> tuple[float, ...]:
    seconds = []
    for _ in range(TRAINING_SLOTS):
        with slot():
            # An uncounted step aligns the ranks and refills this job's caches.
            step()
            communicator.wait()
            for _ in range(TRAINING_STEPS):
                begun = time.perf_counter()
                step()
                communicator.wait()
                seconds.append(time.perf_counter() - begun)
    return tuple(seconds)


if __name__ == "__main__":
    main()
