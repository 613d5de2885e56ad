"""A training-shaped load: steps of a small DistributedDataParallel model."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tccl_py.rank_processes.turns import TakesTurn
from tccl_py.verify.ranks import Ranks

TURNS, STEPS = 4, 5
_WARM = 12
"""DistributedDataParallel rebuilds its buckets early, and a graph wants 11 steps before it."""
_WIDTH_CUDA, _WIDTH_HOST = 4096, 128
_LAYERS = 8


def train(ranks: Ranks, turn: TakesTurn) -> dict[str, tuple[float, ...]]:
    """Seconds of each of STEPS steps in TURNS turns: `eager`, and on GPUs `graph`, a CUDA graph of
    one step."""
    _passed_by_all(turn)
    if not ranks.cuda:
        step = _stepper(ranks)
        _passed_by_all(turn)
        return {"eager": _timed(ranks, step, turn)}
    # Whatever a graph will replay has to be made on a stream that is not the default one.
    stream = ranks.torch.cuda.Stream()
    with ranks.torch.cuda.stream(stream):
        step = _stepper(ranks)
        _passed_by_all(turn)
        eager = _timed(ranks, step, turn)
    with ExitStack() as stack:
        with turn():
            ranks.wait()
            replay = stack.enter_context(ranks.graphed(step, stream=stream))
        return {"eager": eager, "graph": _timed(ranks, replay, turn)}


def _passed_by_all(turn: TakesTurn) -> None:
    """Nothing that is timed before this runs beside anything after it: all jobs make their models
    at the same time, which takes longer than their steps."""
    with turn():
        pass


def _stepper(ranks: Ranks) -> Callable[[], Any]:
    torch = ranks.torch
    nn = torch.nn
    torch.manual_seed(0)
    width = _WIDTH_CUDA if ranks.cuda else _WIDTH_HOST
    # Where they are used: a host takes seconds to make up such numbers.
    layers = [
        one
        for _ in range(_LAYERS)
        for one in (nn.Linear(width, width, device=ranks.device), nn.ReLU())
    ]
    model = nn.Sequential(*layers)
    devices = [ranks.device.index] if ranks.cuda else None
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=devices)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6)
    batch = torch.ones(32, width, device=ranks.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        wrapped(batch).square().mean().backward()
        optimizer.step()

    for _ in range(_WARM):
        step()
    ranks.wait()
    return step


def _timed(ranks: Ranks, step: Callable[[], Any], turn: TakesTurn) -> tuple[float, ...]:
    found = []
    for _ in range(TURNS):
        with turn():
            # One that is not counted brings the ranks together, and this job's caches back.
            step()
            ranks.wait()
            for _ in range(STEPS):
                begun = time.perf_counter()
                step()
                ranks.wait()
                found.append(time.perf_counter() - begun)
    return tuple(found)
