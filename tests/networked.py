"""Small machines with NICs, and sources whose rates are made up."""

import hashlib
import itertools

import msgspec

from tccl_py.model.machine import Nic, check
from tccl_py.model.measurement import Measurement
from tests.toy import toy_machine


def networked_machine(*, gpus, nics=1, numa_nodes=1, name="toy", gdr=False, mbps=100_000):
    """A toy machine whose NICs are dealt to its NUMA nodes in turn."""
    machine = toy_machine(gpus=gpus, numa_nodes=min(numa_nodes, gpus), name=name)
    ports = tuple(
        Nic(
            index=index,
            name=f"mlx5_{index}",
            parent=f"C{index * len(machine.numa_nodes) // nics}",
            bus_id=f"0000:c{index}:00.0",
            speed_mbps=mbps,
            guid=f"0x{index + 1:x}",
            port=1,
            gdr=gdr,
        )
        for index in range(nics)
    )
    made = msgspec.structs.replace(
        machine,
        nics=ports,
        gpus=tuple(msgspec.structs.replace(gpu, gdr=gdr) for gpu in machine.gpus),
    )
    return check(made, where=name)


class MadeUp:
    """Every flow has a rate of its own, from its text and a seed; equal flows share one."""

    simulated = True
    noise = 0.0

    def __init__(self, seed, *, high=9):
        self._seed, self._high = seed, high
        self.asked = 0

    def rate(self, flow):
        digest = hashlib.blake2b(f"{self._seed} {flow}".encode(), digest_size=4).digest()
        return 1.0 + int.from_bytes(digest, "big") % self._high

    def measure(self, sets):
        self.asked += len(sets)
        return [self._answer(one) for one in sets]

    def _answer(self, transfers):
        texts = [str(flow) for flow in transfers.flows]
        return Measurement(
            transfers=transfers,
            samples_gbps=tuple((self.rate(text) / texts.count(text),) for text in texts),
            simulated=True,
        )


def all_chains(space):
    """Every chain of a space, as lists of hops from entry to exit."""
    world, *gpus = space.gpus
    for order in itertools.permutations(gpus):
        stations = (world, *order, world)
        yield from itertools.product(
            *(space.between(one, other) for one, other in itertools.pairwise(stations))
        )
