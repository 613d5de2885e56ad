"""The machine this process runs on -> Machine, Knowledge and Fingerprint.

GPUs, NVLinks and peer access come from the driver (NVML), the PCI tree, NUMA nodes and network
cards from sysfs, so that the result is the same as NCCL's view.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tccl_py.model.machine import (
    Fingerprint,
    Gpu,
    HiddenLink,
    Knowledge,
    Machine,
    Nic,
    NvLink,
    NvSwitch,
    PciBridge,
    check,
    check_knowledge,
    normal_bus_id,
)
from tccl_py.readers.nvml import DriverFacts, GpuFacts, driver_facts
from tccl_py.readers.sysfs import (
    Attachment,
    PciTree,
    Port,
    network_ports,
    numa_nodes,
    read_word,
    system_numa_ids,
)

_WITHOUT_GPU_DIRECT = ("GeForce", "TITAN")  # says docs.nvidia.com/cuda/gpudirect-rdma
_DMA_BUF_SINCE = (5, 12)
_HERE = "this machine"


def discover_machine(
    *, sysfs: Path = Path("/sys"), proc: Path = Path("/proc"), nvml: Any = None
) -> tuple[Machine, Knowledge, Fingerprint]:
    """Discover this machine.

    GPUs and NICs without a NUMA node (virtual machines) hang from NUMA node -1, as in NCCL.
    `Gpu.gdr` follows the product line and `Nic.gdr` the loaded kernel modules; neither is tried.
    Raises InputError: no NVIDIA driver answers, or the answers fit no machine.
    """
    facts = driver_facts(nvml)
    machine = check(_machine(facts, sysfs, proc), where=_HERE)
    links = tuple(_virtual_switch_links(machine.bridges, sysfs))
    knowledge = Knowledge(peer_access=facts.peer_access, hidden_links=links)
    check_knowledge(knowledge, machine, where=_HERE)
    return machine, knowledge, fingerprint_of(facts, sysfs=sysfs, proc=proc)


def _machine(facts: DriverFacts, sysfs: Path, proc: Path) -> Machine:
    # 1. Where everything hangs; this tells which bridges and NUMA nodes there are.
    tree, ports = PciTree(sysfs=sysfs), network_ports(sysfs)
    gpu_places = [tree.attach(gpu.bus_id) for gpu in facts.gpus]
    port_places = [tree.attach(port.bus_id) if port.bus_id else None for port in ports]
    used = [place.numa_id for place in (*gpu_places, *port_places) if place is not None]
    nodes = numa_nodes(used, sysfs=sysfs, proc=proc)
    names = {node.numa_id: node.id for node in nodes}
    # 2. The devices, by those names.
    links = tuple(_nvlinks(facts.gpus, [names[place.numa_id] for place in gpu_places]))
    gdr = _gpu_direct_modules(sysfs, proc)
    nics = enumerate(zip(ports, port_places, strict=True))
    return Machine(
        name=_name(facts),
        numa_nodes=nodes,
        bridges=tree.built(names),
        gpus=tuple(
            Gpu(
                index=gpu.index,
                bus_id=gpu.bus_id,
                parent=place.bridge or names[place.numa_id],
                link=place.link,
                sm=gpu.sm,
                name=gpu.name,
                gdr=not any(line in gpu.name for line in _WITHOUT_GPU_DIRECT),
            )
            for gpu, place in zip(facts.gpus, gpu_places, strict=True)
        ),
        nics=tuple(_nic(index, port, place, names, gdr=gdr) for index, (port, place) in nics),
        nvswitches=(NvSwitch(index=0),) if any(link.target == "S0" for link in links) else (),
        nvlinks=links,
    )


def _name(facts: DriverFacts) -> str:
    """Return a name that equal machines share: `4x-nvidia-h200`."""
    kinds = list(dict.fromkeys(gpu.name for gpu in facts.gpus))
    model = re.sub(r"[^a-z0-9]+", "-", kinds[0].lower()).strip("-") or "gpu"
    return f"{len(facts.gpus)}x-{model}" + ("-and-others" if len(kinds) > 1 else "")


def _nic(
    index: int, port: Port, place: Attachment | None, names: dict[int, str], *, gdr: bool
) -> Nic:
    if place is None:
        # Not on PCI (virtio): NCCL hangs it from the first CPU it knows.
        first = next(iter(names.values()))
        return Nic(index=index, name=port.name, parent=first, speed_mbps=port.speed_mbps)
    return Nic(
        index=index,
        name=port.name,
        parent=place.bridge or names[place.numa_id],
        bus_id=port.bus_id,
        link=place.link,
        speed_mbps=port.speed_mbps,
        gdr=gdr and port.rdma,
        guid=port.guid,
        port=port.port,
    )


def _nvlinks(gpus: Iterable[GpuFacts], cpus: list[str]) -> Iterator[NvLink]:
    """Yield NVLinks by GPU; ends outside this host's GPUs are the switch, as NCCL concludes."""
    known = {gpu.bus_id: f"G{gpu.index}" for gpu in gpus}
    for gpu, cpu in zip(gpus, cpus, strict=True):
        source = f"G{gpu.index}"
        # C2C links end at a CPU, which comes before GPUs and switches.
        if gpu.c2c_links:
            yield NvLink(source=source, target=cpu, count=gpu.c2c_links, kind="c2c")
        counts: dict[str, int] = {}
        for bus_id, count in gpu.links.items():
            target = known.get(bus_id, "S0")
            counts[target] = counts.get(target, 0) + count
        for target, count in sorted(counts.items()):
            yield NvLink(source=source, target=target, count=count)


def _virtual_switch_links(bridges: Iterable[PciBridge], sysfs: Path) -> Iterator[HiddenLink]:
    known = {bridge.id for bridge in bridges}
    for bridge in sorted(known):
        peers = sysfs / "kernel" / "pci_switch_link" / "virtual_switch_links" / bridge
        for entry in sorted(peers.iterdir()) if peers.is_dir() else ():
            other = normal_bus_id(entry.name)
            if other in known and bridge < other:
                note = "one PCIe switch chip"
                yield HiddenLink(one=bridge, other=other, provenance="reported", note=note)


def _gpu_direct_modules(sysfs: Path, proc: Path) -> bool:
    if any((sysfs / "module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")):
        return True
    opened = "Open Kernel Module" in read_word(proc / "driver" / "nvidia" / "version")
    release = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", _kernel(proc))
    return opened and release is not None and ((int(release[1]), int(release[2])) >= _DMA_BUF_SINCE)


def _kernel(proc: Path) -> str:
    return read_word(proc / "sys" / "kernel" / "osrelease")


def fingerprint_of(
    facts: DriverFacts, *, sysfs: Path = Path("/sys"), proc: Path = Path("/proc")
) -> Fingerprint:
    """Return the identity of this host's GPUs, driver and kernel."""
    return Fingerprint(
        gpu_uuids=tuple(gpu.uuid for gpu in facts.gpus),
        driver=facts.driver,
        numa_count=len(system_numa_ids(sysfs)),
        kernel=_kernel(proc),
    )
