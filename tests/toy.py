"""Small regular machines for tests, and the trivial group of their symmetries."""

import numpy as np

from tccl_py.files import decode_json
from tccl_py.model.machine import Gpu, Machine, NumaNode, PciBridge, PciLink, check
from tccl_py.model.symmetry import automorphisms, keeping


def toy_machine(*, gpus, numa_nodes=1, per_switch=0, name="toy"):
    """A small regular machine for examples and tests.

    GPUs are dealt to NUMA nodes in blocks; `per_switch` > 0 puts that many below one bridge.
    """
    bridges = {}
    devices = []
    gen4 = PciLink(speed_gts=16.0, width=16)
    for index in range(gpus):
        parent = f"C{index * numa_nodes // gpus}"
        if per_switch:
            bus = f"0000:{0x80 + index // per_switch:02x}:00.0"
            bridges.setdefault(bus, PciBridge(bus_id=bus, parent=parent, link=gen4))
            parent = bus
        devices.append(
            Gpu(index=index, bus_id=f"0000:{index + 1:02x}:00.0", parent=parent, link=gen4, sm=86)
        )
    nodes = tuple(
        NumaNode(index=i, numa_id=i, vendor="AuthenticAMD", family=25, model=1)
        for i in range(numa_nodes)
    )
    machine = Machine(
        name=name, numa_nodes=nodes, gpus=tuple(devices), bridges=tuple(bridges.values())
    )
    return check(machine, where=name)


def no_symmetry(machine):
    """The trivial group: every device is only itself."""
    whole = automorphisms(machine)
    return keeping(whole, np.zeros(len(whole.elements), dtype=bool))


def machine_from_json(text, *, where):
    """A machine's JSON, decoded and checked."""
    return check(decode_json(text, Machine, where=where), where=where)
