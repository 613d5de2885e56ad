"""What one flow's executors reach by themselves: thread blocks, FIFO windows, copy engines."""

from __future__ import annotations

import math

from tccl_py.simulator.figures import Figures
from tccl_py.simulator.model import ExecutorLimit, Figure
from tccl_py.simulator.routes import Leg, Network
from tccl_py.transfers.transfer import Flow


def applies(limit: ExecutorLimit, network: Network, flow: Flow, legs: tuple[Leg, ...]) -> bool:
    """Whether a limit speaks of this flow; of a bounce, whether of either half.

    A kernel that fills or empties a NIC's FIFO in host memory waits for it as a bounce's does.
    """
    piped = flow.is_bounce or (flow.is_network and any("memory" in leg.keys for leg in legs))
    if (limit.path == "bounce") != piped:
        return False
    return any(
        leg.executor == limit.executor
        and limit.operation in ("any", leg.operation)
        and limit.over in ("any", _over(network, leg))
        for leg in legs
    )


def _over(network: Network, leg: Leg) -> str:
    kinds = {network.kinds[edge] for edge in leg.edges}
    return "nvlink" if kinds <= {"nvlink", "xgmi", "c2c"} else "pci"


def figures_used(limit: ExecutorLimit, flow: Flow) -> tuple[Figure, ...]:
    """The figures behind a flow's limit: one that names no blocks asks for the ceiling only."""
    used = [limit.ceiling]
    if _blocks(limit, flow) is not None:
        used += [limit.per_block, limit.latency_us if limit.path == "bounce" else None]
    return tuple(figure for figure in used if figure is not None)


def unbent(limit: ExecutorLimit, figures: Figures, flow: Flow) -> float:
    """What a flow's blocks would move without the ceiling, in GB/s; inf if it names none."""
    blocks = _blocks(limit, flow)
    if blocks is None or limit.per_block is None:
        return math.inf
    return blocks * _block_rate(limit, figures, flow)


def bent(limit: ExecutorLimit, figures: Figures, together: float) -> float:
    """What blocks that would move `together` GB/s reach below the ceiling; inf if there is none."""
    ceiling = figures.value(limit.ceiling) if limit.ceiling is not None else math.inf
    if math.inf in (together, ceiling):
        return min(together, ceiling)
    # Scaled by the smaller of the two, so that powers neither overflow nor vanish.
    small, large = sorted((together, ceiling))
    bend: float = (1.0 + (small / large) ** limit.sharpness) ** (-1.0 / limit.sharpness)
    return small * bend


def _blocks(limit: ExecutorLimit, flow: Flow) -> int | None:
    return 1 if limit.executor == "copy_engine" else flow.blocks


def _block_rate(limit: ExecutorLimit, figures: Figures, flow: Flow) -> float:
    assert limit.per_block is not None
    rate = figures.value(limit.per_block)
    # A direct flow's FIFO lies in GPU memory: its size is not known to matter.
    if limit.latency_us is None or flow.fifo is None or limit.path != "bounce":
        return rate
    size = flow.fifo.bytes
    if limit.executor == "copy_engine":
        size = max(1, size // flow.fifo.slots)
    # 1 GB/s is 1000 bytes a microsecond.
    return size / (figures.value(limit.latency_us) + size / (rate * 1000.0)) / 1000.0
