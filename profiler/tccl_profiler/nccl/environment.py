"""What NCCL is told, so that a communicator of two GPUs does what a set of flows says.

NCCL reads most variables once in a process; those are the workers', and all flows of a set must
agree on them. The graph file alone is read with every communicator: it names the NIC.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tccl_profiler.program import Carrier, Link
from tccl_py.errors import MeasurementError

_DROPPED = ("NCCL_GRAPH_FILE", "NCCL_IB_HCA", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")
"""A graph file's NICs are counted among those that NCCL uses: it must use all."""
_FARTHEST, _NEVER = "SYS", "LOC"
_GRAPHS = """<graphs version="1">
{ring}{tree}</graphs>
"""
_GRAPH = """  <graph id="{number}" pattern="{pattern}" crossnic="0" nchannels="{count}" \
speedintra="10" speedinter="10" latencyinter="0" typeintra="LOC" typeinter="SYS" samechannels="1">
{channels}  </graph>
"""
_CHANNEL = """    <channel>
      <net dev="{nic:#x}"/>
      <gpu dev="{gpu:#x}"/>
      <net dev="{nic:#x}"/>
    </channel>
"""
_RING, _TREE = (0, 4), (1, 3)
"""Id and pattern; a communicator has no more channels than its tree."""


def process_variables(links: Collection[Link]) -> dict[str, str]:
    """The variables of every worker that carries these links; none where NCCL carries none.

    Raises:
        MeasurementError: the flows would need several processes on a GPU: FIFOs of several sizes,
            or NICs of which some reach GPU memory and others do not.
    """
    carriers = sorted({link.carrier for link in links if link.carrier is not None})
    if not carriers:
        return {}
    sizes = {one.fifo_bytes for one in carriers}
    into, out = ({one.direct_in for one in carriers}, {one.direct_out for one in carriers})
    if len(sizes) > 1:
        raise MeasurementError("NCCL has FIFOs of one size in a process, flows here have several")
    if len(into) > 1 or len(out) > 1 or (True in out and False in into):
        # GPU memory that a NIC reads and never writes is beyond what NCCL's variables say.
        raise MeasurementError(
            "NCCL lets NICs reach GPU memory by one rule in a process: all that receive alike, and "
            "all that send alike, directly only if those that receive do"
        )
    return {
        "NCCL_BUFFSIZE": str(sizes.pop()),
        "NCCL_NET_GDR_LEVEL": _FARTHEST if True in into else _NEVER,
        "NCCL_NET_GDR_READ": str(int(True in out)),
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        # Bytes that leave a host go by the NIC that is named, not by one beside another GPU.
        "NCCL_PXN_DISABLE": "1",
        "NCCL_CROSS_NIC": "1",
    }


def without_disturbance(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that contradict what is asked of NCCL."""
    return {name: value for name, value in environment.items() if name not in _DROPPED}


def graph_text(gpu: int, carrier: Carrier, *, sends: bool) -> str:
    """The graph file of one of the two GPUs: NCCL's number of it, and the NIC on its host.

    NCCL makes twice as many channels as a file has.
    """
    nic = carrier.nic_out if sends else carrier.nic_in
    count = (carrier.channels + 1) // 2
    channel = _CHANNEL.format(gpu=gpu, nic=nic)
    ring, tree = (
        _GRAPH.format(number=number, pattern=pattern, count=count, channels=channel * count)
        for number, pattern in (_RING, _TREE)
    )
    return _GRAPHS.format(ring=ring, tree=tree)
