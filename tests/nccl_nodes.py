"""Nodes with NICs where a test wants them."""

import msgspec

from tccl_py.model.machine import Machine, Nic, PciLink


def with_nics(
    node: Machine, beside: dict[int, str], *, speed_mbps: int = 200_000, gdr: bool = True
) -> Machine:
    """The node with NICs, each hanging where a device hangs; GPUs support GPU direct if they do."""
    nics = tuple(
        Nic(
            index=index,
            name=f"mlx5_{index}",
            parent=node.parents[device],
            bus_id=f"0000:{0xE0 + index:02x}:00.0",
            link=PciLink(speed_gts=32.0, width=16),
            speed_mbps=speed_mbps,
            gdr=gdr,
            guid=f"0x{index + 1:x}",
            port=1,
        )
        for index, device in beside.items()
    )
    gpus = tuple(msgspec.structs.replace(gpu, gdr=gdr) for gpu in node.gpus)
    return msgspec.structs.replace(node, nics=nics, gpus=gpus)
