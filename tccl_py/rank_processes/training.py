"""A training step of a rank: a small GPT, data parallel or split over ranks.

Its weights and data follow from fixed seeds, so every job has to find the same loss and gradients.
A tensor-parallel GPT splits heads and the hidden layer by columns, then by rows: each half of a
block ends with an all-reduce, and its gradient with another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tccl_py.rank_processes.rank import Communicator

_COMPARED_STEPS = 3
"""Steps from the first weights after which values are compared: sums in another order differ by
rounding, and training amplifies that. After 36 steps gradients of arms on two H200 differed by
0.6 %, and by 0.15 % between ranks of one job."""
_RATE = 0.01


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

    def values(self, step: Callable[..., Any]) -> tuple[float, ...]:
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
            entered = self._enter(functional.layer_norm(state, (width,)))
            query, key, value = (
                functional.linear(entered, part).unflatten(2, (heads, -1)).transpose(1, 2)
                for part in attend
            )
            mean = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            state = state + self._leave(functional.linear(mean.transpose(1, 2).flatten(2), mixed))
            entered = self._enter(functional.layer_norm(state, (width,)))
            hidden = functional.gelu(functional.linear(entered, up))
            state = state + self._leave(functional.linear(hidden, down))
        logits = functional.linear(functional.layer_norm(state, (width,)), words)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _enter(self, state: Any) -> Any:
        """Return the input of split weights: its gradient is the sum over all parts."""
        if self._parts > 1:
            state.register_hook(self._total)
        return state

    def _leave(self, state: Any) -> Any:
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
