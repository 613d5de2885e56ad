"""Transports by which sets over several hosts are measured: each is a row of one table."""

from __future__ import annotations

import msgspec

from tccl_py.model.transfer import Flow


class NicTransport(msgspec.Struct, frozen=True, kw_only=True):
    """How the bytes of flows go from host to host.

    `backend` is that of the sources that measure by it. Where it `joins_gpus`, the GPUs at a flow's
    ends move the bytes, and it opens the NICs. Else, and for flows that end in host memory, NICs
    are devices of the class `nic_device` (module:class). Where all NICs `need_addresses`, these are
    such as other hosts reach. `unmeasured` says which flows have the speed of a NIC's port.
    """

    backend: str
    joins_gpus: bool = False
    nic_device: str = "tccl_profiler.tcp:NicDevice"
    need_addresses: bool = False
    unmeasured: str = ""

    def carries(self, flow: Flow) -> bool:
        """Return whether a flow goes from GPU to GPU by no device between them."""
        ends = {flow.source.kind, flow.destination.kind}
        return self.joins_gpus and flow.is_network and ends == {"G"}


NIC_TRANSPORTS = {
    "nccl": NicTransport(
        backend="cuda",
        joins_gpus=True,
        unmeasured="what GPUs send by another GPU's memory was not measured, but assumed to run at "
        "the speed of the NICs' ports; all else was measured",
    ),
    "tcp": NicTransport(backend="host", need_addresses=True),
}


def transport_of(backend: str) -> str:
    """Return the name of the transport of a backend.

    >>> transport_of("cuda"), transport_of("host")
    ('nccl', 'tcp')
    """
    return next(name for name, row in NIC_TRANSPORTS.items() if row.backend == backend)
