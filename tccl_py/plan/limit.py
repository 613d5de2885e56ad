"""The machine's limit for given rings: bare copies over the same hops, all at the same time.

No copy waits for another, as the hops of a ring do. So the limit says how much of the machine's
bandwidth the FIFO protocol leaves unused.
"""

from __future__ import annotations

from contextlib import suppress

from tccl_py.errors import MeasurementError
from tccl_py.measurements.measurement import BandwidthSource
from tccl_py.transfers.hops import RingSet
from tccl_py.transfers.transfer import Fifo, Flow, Place, Transfer, TransferSet, transfer_set


def limit_gbps(source: BandwidthSource, rings: RingSet, *, assumed: bool) -> float | None:
    """Measure bare copies over the hops of a ring set, by copy engines and by kernels.

    Args:
        source: of the rings' own rates, too.
        rings: the rings of a plan's recommended choice.
        assumed: whether assumed values may lie behind the limit, as they do behind the plan.

    Returns:
        The better of the two in GB/s, scored as the rings are; None if neither can be measured.
    """
    rates = []
    for copy_engine in (True, False):
        with suppress(MeasurementError):
            (found,) = source.measure([bare_copies(rings, copy_engine=copy_engine)])
            if assumed or not found.assumed:
                rates.append(len(rings.rings) * found.rate_gbps)
    return max(rates, default=None)


def bare_copies(rings: RingSet, *, copy_engine: bool) -> TransferSet:
    """Return a plain transfer for each transfer of the rings' hops.

    A bounce becomes an independent write and read of host memory as large as its FIFOs together:
    in a larger buffer the host's memory would decide, not its caches.
    """
    flows = []
    for flow in rings.flows.flows:
        size = (flow.blocks or 1) * (flow.fifo or Fifo()).bytes if flow.is_bounce else None
        for one in flow.transfers:
            executor = Place("D" if copy_engine else "G", one.executor.index)
            bare = Transfer(one.source, executor, one.destination)
            flows.append(Flow((bare,), buffer=size))
    return transfer_set(flows)
