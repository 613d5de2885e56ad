"""Random machines as NCCL topology XML, for tests that compare this project with NCCL itself.

`random_machine(random.Random(seed))` is the same machine for the same seed. Sizes stay below
NCCL's limit of 256 elements in a topology file.
"""

import itertools
import random
import xml.etree.ElementTree as ET
from xml.sax.saxutils import quoteattr

SMS = (70, 75, 80, 86, 89, 90, 100, 120)
CPUS = (
    {"arch": "x86_64", "vendor": "AuthenticAMD", "familyid": 25, "modelid": 17},
    {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": 6, "modelid": 85},
    {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": 6, "modelid": 143},
    {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": 6, "modelid": 207},
    {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": 6, "modelid": 79},
    {"arch": "arm64"},
)
CHIPS = {
    "bridge": {"class": "0x060400", "vendor": "0x10b5", "device": "0x9765",
               "subsystem_vendor": "0x10b5", "subsystem_device": "0x9765"},
    "broadcom": {"class": "0x060400", "vendor": "0x1000", "device": "0xc010",
                 "subsystem_vendor": "0x1000", "subsystem_device": "0xa024"},
    "gpu": {"class": "0x030200", "vendor": "0x10de", "device": "0x2330",
            "subsystem_vendor": "0x10de", "subsystem_device": "0x16c1"},
    "nic": {"class": "0x020700", "vendor": "0x15b3", "device": "0x1021",
            "subsystem_vendor": "0x15b3", "subsystem_device": "0x0041"},
}  # fmt: skip
SPEEDS = ("8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe")
NVLINKS = ("none", "none", "pairs", "all", "ring", "cube", "switch", "random")
ENVIRONMENTS = {
    "NCCL_P2P_LEVEL": ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS"),
    "NCCL_NET_GDR_LEVEL": ("LOC", "PIX", "PXB", "PHB", "SYS"),
    "NCCL_NET_GDR_READ": ("0", "1"),
    "NCCL_CROSS_NIC": ("0", "1", "2"),
}


def random_environment(rng: random.Random) -> dict[str, str]:
    """Return settings that NCCL's graph search depends on; often none."""
    return {name: rng.choice(values) for name, values in ENVIRONMENTS.items() if rng.random() < 0.2}


def random_machine(
    rng: random.Random,
    *,
    gpus: int | None = None,
    nics: bool = True,
    sm: int | None = None,
    nvlinks: str | None = None,
) -> tuple[str, list[int]]:
    """Return the XML of a machine and some of its GPUs (two or more, ascending) to communicate.

    Args:
        rng: where all choices come from.
        gpus: how many GPUs the machine has; None is 2 to 16, mostly up to 8.
        nics: whether it may have NICs.
        sm: compute capability of its GPUs; None is any, on few machines a mixture.
        nvlinks: one of `NVLINKS`; None is any.
    """
    machine = _Machine(rng, nics=nics, sm=sm)
    count = gpus or rng.choice((2, 3, 4, 4, 4, 6, 8, 8, 8, rng.randint(9, 16)))
    text = machine.build(count, nvlinks or rng.choice(NVLINKS))
    everyone = list(range(count))
    some = everyone if rng.random() < 0.7 else rng.sample(everyone, rng.randint(2, count))
    return text, sorted(some)


class _Machine:
    def __init__(self, rng: random.Random, *, nics: bool, sm: int | None) -> None:
        self.rng = rng
        self.nics = rng.choice(("none", "few", "beside", "beside")) if nics else "none"
        self.sm = sm or rng.choice(SMS)
        self.mixed = sm is None and rng.random() < 0.05
        self.speed, self.gdr = rng.choice(SPEEDS), rng.choice((0, 1))
        self.net_mbps = rng.choice((25000, 50000, 100000, 100000, 200000, 200000, 400000))
        self.buses = itertools.count(0x11)
        self.net_count = 0

    def build(self, count: int, nvlinks: str) -> str:
        rng, sockets = self.rng, self.rng.choice((1, 2, 2, 4))
        ordered = rng.random() < 0.7
        devs = list(range(count)) if ordered else rng.sample(range(count), count)
        groups: list[list[int]] = [[] for _ in range(sockets)]
        for place, dev in enumerate(devs):
            groups[place * sockets // count if rng.random() < 0.9 else rng.randrange(sockets)] += [
                dev
            ]
        self.bus_of = {}
        plan = [self._branches(group) for group in groups]
        self.links = self._nvlinks(devs, nvlinks if count <= 8 or nvlinks != "all" else "switch")
        kind = rng.choice(CPUS)
        nodes = [
            self._element("cpu", {"numaid": node, "affinity": "ffffffff", **kind},
                          [self._render(branch) for branch in branches])
            for node, branches in enumerate(plan)
        ]  # fmt: skip
        return self._element("system", {"version": 1}, nodes) + "\n"

    def _branches(self, group: list[int]) -> list:
        """Return what hangs from one CPU: GPUs, NICs and switches of them, as nested lists."""
        rng, branches, rest = self.rng, [], list(group)
        switched, layered = rng.random() < 0.6, rng.random() < 0.15
        while rest:
            size = rng.choice((1, 2, 2, 4)) if switched else 1
            children = [self._gpu(dev) for dev in rest[:size]]
            del rest[:size]
            if self.nics == "beside" and rng.random() < 0.8:
                children.insert(rng.choice((0, len(children))), self._nic())
            branches.append(self._switch(children) if switched else children)
        if self.nics == "few" and rng.random() < 0.7:
            branches.append(self._nic())
        flat = [one for part in branches for one in (part if isinstance(part, list) else [part])]
        return [self._switch(flat)] if layered and flat else flat

    def _device(self, kind: str, **more) -> dict:
        return {"kind": kind, "bus": f"0000:{next(self.buses):02x}:00.0", **more}

    def _gpu(self, dev: int) -> dict:
        gpu = self._device("gpu", dev=dev)
        self.bus_of[dev] = gpu["bus"]
        return gpu

    def _nic(self) -> dict:
        ports = 2 if self.rng.random() < 0.1 else 1
        nic = self._device("nic", nets=range(self.net_count, self.net_count + ports))
        self.net_count += ports
        return nic

    def _switch(self, children: list) -> dict:
        kind = "broadcom" if self.rng.random() < 0.15 else "bridge"
        return self._device(kind, children=children)

    def _nvlinks(self, devs: list[int], kind: str) -> dict[tuple[int, int], int]:
        """Return links of pairs of GPUs, or of (GPU, -1) to the NVSwitches."""
        rng, count, width = self.rng, len(devs), self.rng.choice((1, 2, 4))
        pairs = list(itertools.combinations(range(count), 2))
        ring = {tuple(sorted((place, (place + 1) % count))) for place in range(count)}
        chosen = {
            "none": [],
            "pairs": [(a, b) for a, b in pairs if a % 2 == 0 and b == a + 1],
            "all": pairs,
            "ring": sorted(ring),
            "random": [one for one in pairs if rng.random() < 0.3],
            "cube": [(a, b) for a, b in pairs if a // 4 == b // 4 or b - a == 4],
            "switch": [(place, -1) for place in range(count)],
        }[kind]  # fmt: skip
        uneven = rng.random() < 0.3
        return {
            (devs[a], devs[b] if b >= 0 else -1): rng.choice((1, 2)) if uneven and b >= 0 else width
            for a, b in chosen if a != b
        }  # fmt: skip

    def _render(self, device: dict) -> str:
        kind, rng = device["kind"], self.rng
        link = {"link_speed": self.speed, "link_width": 16 if rng.random() < 0.95 else 8}
        inner = [self._render(child) for child in device.get("children", ())]
        if kind == "gpu":
            inner = [self._render_gpu(device["dev"])]
        elif kind == "nic":
            inner = [self._element("nic", {}, [self._net(dev, port) for port, dev in
                                               enumerate(device["nets"], 1)])]  # fmt: skip
        return self._element("pci", {"busid": device["bus"], **CHIPS[kind], **link}, inner)

    def _render_gpu(self, dev: int) -> str:
        sm = self.rng.choice(SMS) if self.mixed else self.sm
        inner = []
        for pair, count in self.links.items():
            if dev in pair:
                other = pair[0] + pair[1] - dev
                bus, kind = (
                    (self.bus_of[other], "0x030200") if other >= 0 else ("0000:ff:00.0", "0x068000")
                )
                inner.append(
                    self._element("nvlink", {"target": bus, "count": count, "tclass": kind})
                )
        return self._element("gpu", {"dev": dev, "sm": sm, "rank": dev, "gdr": self.gdr}, inner)

    def _net(self, dev: int, port: int) -> str:
        speed = self.net_mbps if self.rng.random() < 0.9 else self.rng.choice((25000, 400000))
        return self._element("net", {
            "name": f"mlx5_{dev}", "dev": dev, "latency": "0.0", "speed": speed, "port": port,
            "guid": f"{0xA0 + dev - port + 1:#x}", "maxconn": 131072, "gdr": self.gdr,
        })  # fmt: skip

    def _element(self, tag: str, attributes: dict, inner: list[str] = ()) -> str:
        named = "".join(f" {name}={quoteattr(str(value))}" for name, value in attributes.items())
        return f"<{tag}{named}>\n{''.join(inner)}</{tag}>\n" if inner else f"<{tag}{named}/>\n"


PRETENDED = tuple(f"0000:{16 * (dev + 1) + 8:02x}:00.0" for dev in range(8))
"""Bus ids of the GPUs of every `pcie_machine`, by NVML index."""
MODERN_CPUS = (
    *CPUS[:-1],
    # Without a vendor, NCCL on an x86 host writes the host's own into each rank's CPU.
    {"arch": "arm64", "vendor": "ARM", "familyid": 0, "modelid": 0},
    *({"arch": "x86_64", "vendor": "AuthenticAMD", "familyid": family, "modelid": 17}
      for family in (23, 26, 143, 175, 191)),
    {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": 6, "modelid": 173},
    {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": 6, "modelid": 175},
    {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": 6, "modelid": 106},
)  # fmt: skip


def pcie_machine(seed: int) -> str:
    """Return the topology XML of a machine of 8 GPUs over PCIe, a tenth with NVLink bridges.

    All machines have their GPUs at the bus ids `PRETENDED`, each anywhere in its tree, and one
    interface, `lo`. Elements stand in the order in which NCCL discovers them, so that a rank that
    reads the file sees what a rank sees on the machine.
    """
    rng = random.Random(f"pcie {seed}")
    sm, nvlinks = rng.choice((80, 86, 89, 90, 100, 120)), "pairs" if rng.random() < 0.1 else "none"
    text, _ = random_machine(rng, gpus=8, nics=False, sm=sm, nvlinks=nvlinks)
    root, cpu = ET.fromstring(text), rng.choice(MODERN_CPUS)
    buses: dict[str, str] = {}
    for node in root:
        for name in ("vendor", "familyid", "modelid", "arch"):
            node.attrib.pop(name, None)
        node.attrib |= {name: str(value) for name, value in cpu.items()}
        _place(node, 0, buses)
    for gpu in root.iter("gpu"):
        del gpu.attrib["rank"]
        for link in gpu.findall("nvlink"):
            link.set("target", buses[link.get("target")])
    nodes = [node for node in root if len(node)]
    root[:] = sorted(nodes, key=lambda node: node.find(".//gpu[@dev='0']") is None)
    nic = ET.SubElement(rng.choice(list(root)), "nic")
    ET.SubElement(nic, "net", {
        "name": "lo", "dev": "0", "latency": "0", "speed": "10000", "port": "0", "guid": "0x0",
        "maxconn": "65536", "gdr": "0", "rail": "-1", "plane": "-1",
    })  # fmt: skip
    for element in root.iter():
        element.text = element.tail = "\n"
    return ET.tostring(root, encoding="unicode")


def _place(above: ET.Element, depth: int, buses: dict[str, str]) -> None:
    """Give what hangs below a CPU or bridge its bus id, a bridge's just before its first GPU."""
    for device in above:
        _place(device, depth + 1, buses)
        gpu = device.find("gpu")
        if gpu is not None:
            buses[device.get("busid")] = PRETENDED[int(gpu.get("dev"))]
        elif device.tag == "pci":
            first = min(int(gpu.get("dev")) for gpu in device.iter("gpu"))
            buses[device.get("busid")] = f"0000:{16 * (first + 1) + depth:02x}:00.0"
        if device.tag == "pci":
            device.set("busid", buses[device.get("busid")])
    above[:] = sorted(above, key=lambda device: device.get("busid", ""))
