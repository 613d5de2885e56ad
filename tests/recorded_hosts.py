"""Hosts recorded as text: their files and links are written below a directory and looked at.

Lines of `tests/cases/doctor/*.txt`: `PATH = TEXT` a file (with \\n and \\t), `PATH -> TARGET` a
link from the host's root, and `pci A/B/C NAME=TEXT ...`, apart by tabs, a PCI device below others,
where `acs=HEX` is a configuration space with that ACS control register and `iommu=N` the number of
its group.
"""

import struct

from tccl_py.health.host import HostState
from tests.nccl_cases import CASES

RECORDED = CASES / "doctor"


def config_space(control, *, size=4096):
    """A configuration space: AER at 0x100, then ACS at 0x148."""
    space = bytearray(size)
    if size > 0x150:
        struct.pack_into("<I", space, 0x100, 0x148 << 20 | 1 << 16 | 0x0001)
        struct.pack_into("<IHH", space, 0x148, 1 << 16 | 0x000D, 0x007F, control)
    return bytes(space)


def recorded(name, root, **more):
    """The host of that name, below `root`."""
    for line in (RECORDED / f"{name}.txt").read_text().splitlines():
        if line.startswith("pci "):
            pci(root, *line.split("\t"))
        elif " -> " in line:
            link(root, *line.split(" -> "))
        elif line and not line.startswith("#"):
            path, _, text = line.partition(" = ")
            write(root, path, text.encode().decode("unicode_escape") + "\n")
    return HostState(root=root, **more)


def write(root, path, content):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def link(root, path, target):
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    up = "../" * path.count("/")
    place.symlink_to(up + target)


def pci(root, chain, *attributes):
    """One device; the last part of the chain is its bus id."""
    chain = chain.removeprefix("pci ")
    bus = chain.split("/")[-1]
    base = f"sys/devices/pci{chain.split('/')[0][:7]}/{chain}"
    for name, _, text in (one.partition("=") for one in attributes):
        if name == "acs":
            write(root, f"{base}/config", config_space(int(text, 16)))
        elif name == "iommu":
            link(root, f"{base}/iommu_group", f"sys/kernel/iommu_groups/{text}")
        else:
            write(root, f"{base}/{name}", f"{text}\n")
    link(root, f"sys/bus/pci/devices/{bus}", base)
