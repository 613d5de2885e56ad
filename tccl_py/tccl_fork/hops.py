"""Hops of a runtime that chooses a mechanism for every hop by itself, as the `tccl` fork does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import permutations

from tccl_py.model.knowledge import Knowledge
from tccl_py.model.machine import Machine
from tccl_py.model.rings import Hop, HopSpace
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES, Fifo, Flow, bounce, direct_read, direct_write


def free_hop_space(
    machine: Machine,
    knowledge: Knowledge,
    *,
    gpus: Sequence[int] | None = None,
    blocks: int | None = None,
    fifo_bytes: int = DEFAULT_FIFO_BYTES,
    direct: Collection[tuple[int, int]] | None = None,
) -> HopSpace:
    """Direct write and read where access is possible, and a bounce through every NUMA node.

    Args:
        machine: where the GPUs are.
        knowledge: which pairs can access each other.
        gpus: NVML indices; None is all.
        blocks: thread blocks that move each hop.
        fifo_bytes: size of a hop's FIFO for one block.
        direct: pairs that may access each other; None is all that can.

    Raises:
        InputError: an unknown GPU.
    """
    chosen = machine.gpu_indices if gpus is None else gpus
    order = tuple(sorted(machine.gpu(index).index for index in chosen))
    fifo = Fifo(bytes=fifo_bytes)
    hops = {
        (source, target): tuple(
            Hop(source, target, flow)
            for flow in (
                *(
                    _direct(machine, knowledge, (source, target), blocks, fifo)
                    if direct is None or (source, target) in direct
                    else ()
                ),
                *_bounces(machine, (source, target), blocks, fifo),
            )
        )
        for source, target in permutations(order, 2)
    }
    return HopSpace(name="tccl", gpus=order, hops=hops)


def _direct(
    machine: Machine,
    knowledge: Knowledge,
    pair: tuple[int, int],
    blocks: int | None,
    fifo: Fifo,
) -> list[Flow]:
    source, target = pair
    flows = []
    if knowledge.can_access(machine, source, target):
        flows.append(direct_write(source, target, blocks=blocks, fifo=fifo))
    if knowledge.can_access(machine, target, source):
        flows.append(direct_read(source, target, blocks=blocks, fifo=fifo))
    return flows


def _bounces(machine: Machine, pair: tuple[int, int], blocks: int | None, fifo: Fifo) -> list[Flow]:
    source, target = pair
    return [
        bounce(source, target, node.index, blocks=blocks, fifo=fifo) for node in machine.numa_nodes
    ]
