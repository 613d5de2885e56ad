"""The Machine: one node's structure as data, and Knowledge: facts beyond the structure. No rates.

Ids name devices everywhere: `G2` a GPU, `C1` a NUMA node (its CPU and host memory), `N0` a NIC,
`S0` an NVLink switch; a PCI bridge is named by bus id.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from itertools import chain, combinations, permutations
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from tccl_py.errors import InputError, check_once, require
from tccl_py.files import check_version, encode_json, pick
from tccl_py.model.links import LinkFact
from tccl_py.model.transfer import MAX_INDEX, index_of

if TYPE_CHECKING:
    import networkx as nx


FORMAT_VERSION = 1
MAX_GPUS = 64  # NCCL's own limit a node; more is a malformed file
_MOST_LANES = 32
_NIC_LABEL = re.compile("NIC[0-9]+", re.ASCII)
CPU_VENDORS = {"amd": "AuthenticAMD", "intel": "GenuineIntel"}
"""Vendors of x86 CPUs by the names of users."""


class PciLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The PCI Express link from a device up to its parent; None is "not reported"."""

    speed_gts: Annotated[float, msgspec.Meta(gt=0, lt=1000)] | None = None
    width: Annotated[int, msgspec.Meta(ge=1, le=255)] | None = None
    """The number that NCCL takes for lanes, also 255, by which the kernel says "unknown"."""

    @property
    def lanes(self) -> int | None:
        """The lanes of a real link; None if they are unknown."""
        return self.width if (self.width or 0) <= _MOST_LANES else None

    @property
    def gbps(self) -> float | None:
        """Bandwidth in one direction, without packet headers; None if unknown.

        >>> round(PciLink(speed_gts=16.0, width=16).gbps, 1)
        31.5
        """
        if not self.speed_gts or not self.lanes:
            return None
        return self.speed_gts * self.lanes / 8 * (128 / 130 if self.speed_gts >= 8 else 0.8)


class _Numbered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device with an id of a letter and an index."""

    _letter: ClassVar[str]
    index: int

    @property
    def id(self) -> str:
        """The device id, as `G0`."""
        return f"{self._letter}{self.index}"


class NumaNode(_Numbered, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A NUMA node: a CPU, or part of one, and memory; `numa_id` -1 is of virtual machines."""

    _letter = "C"
    numa_id: int
    arch: str = "x86_64"
    vendor: str = ""
    family: int | None = None
    model: int | None = None
    affinity: str = ""
    socket: int | None = None


class PciBridge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A PCI bridge or switch, identified by its bus id."""

    bus_id: str
    parent: str
    link: PciLink = PciLink()
    vendor: str = ""
    device: str = ""
    subsystem_vendor: str = ""
    subsystem_device: str = ""

    @property
    def id(self) -> str:
        """The device id, which is the bus id."""
        return self.bus_id


class Gpu(_Numbered, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU; `index` is the NVML index, `sm` the compute capability times ten (90 for 9.0)."""

    _letter = "G"
    bus_id: str
    parent: str
    link: PciLink = PciLink()
    sm: Annotated[int, msgspec.Meta(ge=0, le=1000)] | None = None
    name: str = ""
    gdr: bool = False


class Nic(_Numbered, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network port; `index` is the net plugin's device number, `speed_mbps` 0 if unknown."""

    _letter = "N"
    name: str
    parent: str
    bus_id: str = ""
    link: PciLink = PciLink()
    speed_mbps: int = 0
    gdr: bool = False
    guid: str = ""
    port: int = 0

    @property
    def rdma(self) -> bool:
        """True for RDMA ports, which count from 1; NCCL writes a guid of 0x0 for interfaces."""
        return self.port > 0 or self.guid.strip("0x") != ""

    @property
    def has_name(self) -> bool:
        """Whether variables can name it: some files have only a NIC's place, or a label."""
        return self.name != self.bus_id and not _NIC_LABEL.fullmatch(self.name)


class NvSwitch(_Numbered, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An NVLink switch; all planes of a fabric are a single switch here."""

    _letter = "S"
    bus_id: str = ""


class NvLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` bonded links that leave `source`; `target` is a GPU, an NVLink switch or a CPU."""

    source: str
    target: str
    count: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    kind: Literal["nvlink", "xgmi", "c2c"] = "nvlink"

    @property
    def joins_gpus(self) -> bool:
        """Return whether a GPU is at both ends."""
        return self.source[0] == self.target[0] == "G"


PciDevice = PciBridge | Gpu | Nic
Device = NumaNode | PciBridge | Gpu | Nic | NvSwitch


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A node's structure: a PCI tree below NUMA nodes, and NVLinks; `check` holds it together."""

    name: str
    numa_nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]
    bridges: tuple[PciBridge, ...] = ()
    nics: tuple[Nic, ...] = ()
    nvswitches: tuple[NvSwitch, ...] = ()
    nvlinks: tuple[NvLink, ...] = ()
    format_version: int = FORMAT_VERSION

    @cached_property
    def gpu_indices(self) -> tuple[int, ...]:
        """NVML indices in order."""
        return tuple(gpu.index for gpu in self.gpus)

    @property
    def pci_devices(self) -> tuple[PciDevice, ...]:
        """All devices with a PCI parent."""
        return (*self.bridges, *self.gpus, *self.nics)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices with an id."""
        return (*self.numa_nodes, *self.bridges, *self.gpus, *self.nics, *self.nvswitches)

    @cached_property
    def parents(self) -> dict[str, str]:
        """Each PCI device's id -> its parent's id."""
        return {device.id: device.parent for device in self.pci_devices}

    @cached_property
    def links(self) -> dict[str, PciLink]:
        """Each PCI device's id -> the link to the parent."""
        return {device.id: device.link for device in self.pci_devices}

    def ancestors(self, device: str) -> tuple[str, ...]:
        """Return the ids from `device`'s parent up to its NUMA node."""
        chain = []
        while device in self.parents:
            device = self.parents[device]
            chain.append(device)
        return tuple(chain)

    def has_nvlink(self, source: int, target: int) -> bool:
        """Return whether NVLinks join two GPUs, directly or through a switch."""
        ends = (f"G{source}", f"G{target}")
        linked = {frozenset((link.source, link.target)) for link in self.nvlinks}
        paths = [{frozenset((end, s.id)) for end in ends} for s in self.nvswitches]
        return frozenset(ends) in linked or any(path <= linked for path in paths)

    @property
    def nvlinks_unknown(self) -> bool:
        """Whether a topology file has GPUs by PCI class alone, so that NVLinks may be missing."""
        # The reader of nvidia-smi, whose text tells NVLinks and no names, invents bus ids.
        bare = (g.sm is None and not g.name and not g.bus_id.startswith("ffff:") for g in self.gpus)
        return not self.nvlinks and all(bare)

    @property
    def cpu_unknown(self) -> bool:
        """Whether the CPUs are of x86 and of a vendor that nobody told; NCCL's rules ask for it."""
        return not any(n.vendor for n in self.numa_nodes) and self.numa_nodes[0].arch == "x86_64"

    def with_cpu(self, name: str | None) -> Machine:
        """Return the machine with CPUs of a vendor by the user's name (InputError if known)."""
        if name is None:
            return self
        fault = f"is for machines whose CPU is not known; that of {self.name} is"
        require(self.cpu_unknown, "`cpu`", fault, "leave it out")
        nodes = (msgspec.structs.replace(n, vendor=CPU_VENDORS[name]) for n in self.numa_nodes)
        return msgspec.structs.replace(self, numa_nodes=tuple(nodes))

    def numa_of(self, device: str) -> int:
        """Return the index of a device's NUMA node."""
        root = (device, *self.ancestors(device))[-1]
        return index_of(root)

    @cached_property
    def graph(self) -> nx.Graph:
        """Undirected graph of all devices; edges carry `kind` (pci, smp, nvlink, xgmi, c2c)."""
        import networkx as nx  # noqa: PLC0415 (slow to import, and few commands need it)

        graph = nx.Graph()
        colours: dict[str, tuple[object, ...]] = {
            **{node.id: ("numa", node.arch, node.vendor, node.model) for node in self.numa_nodes},
            **{bridge.id: ("bridge", bridge.vendor, bridge.device) for bridge in self.bridges},
            **{gpu.id: ("gpu", gpu.sm, gpu.name, gpu.gdr) for gpu in self.gpus},
            **{nic.id: ("nic", nic.speed_mbps, nic.gdr) for nic in self.nics},
            **{switch.id: ("nvswitch",) for switch in self.nvswitches},
        }
        for device, colour in colours.items():
            graph.add_node(device, colour=colour)
        for child, link in self.links.items():
            colour = ("pci", link.speed_gts, link.width)
            graph.add_edge(child, self.parents[child], kind="pci", colour=colour)
        for node, peer in combinations(self.numa_nodes, 2):
            same_socket = node.socket is not None and node.socket == peer.socket
            graph.add_edge(node.id, peer.id, kind="smp", colour=("smp", same_socket))
        for nvlink in self.nvlinks:
            # A device may have a PCI edge and a C2C link to its CPU: the graph keeps the faster.
            kind = nvlink.kind
            graph.add_edge(nvlink.source, nvlink.target, kind=kind, colour=(kind, nvlink.count))
        return graph

    def gpu(self, index: int) -> Gpu:
        """Return the GPU with this NVML index; the InputError names the known indices."""
        for gpu in self.gpus:
            if gpu.index == index:
                return gpu
        indices = ", ".join(str(i) for i in self.gpu_indices)
        raise InputError(f"GPU {index}", f"is not in machine {self.name}", f"it has {indices}")


def check(machine: Machine, *, where: str) -> Machine:
    """Return `machine` if its parts fit together (InputError)."""
    # 1. Counts.
    check_version(machine.format_version, FORMAT_VERSION, where)
    count, right = len(machine.gpus), f"at most {MAX_GPUS} fit a node"
    require(count <= MAX_GPUS, where, f"has {count} GPUs", right)
    require(machine.numa_nodes, where, "has no NUMA node", "one <cpu> or NUMA node is the root")
    require(machine.gpus, where, "has no GPU", "a machine to plan for has at least one")
    indices = [device.index for device in (*machine.numa_nodes, *machine.nics, *machine.gpus)]
    require(min(indices) >= 0, where, "has a negative device index", "indices count from 0")
    fault, right = f"has device index {max(indices)}", f"at most {MAX_INDEX} has a name in flows"
    require(max(indices) <= MAX_INDEX, where, fault, right)
    # 2. Names.
    bus_ids = [b.bus_id for b in machine.bridges] + [g.bus_id for g in machine.gpus]
    for ids, kind in (([d.id for d in machine.devices], "device"), (bus_ids, "bus id")):
        check_once(where, kind, ids)
    # 3. The tree.
    inner = {n.id for n in machine.numa_nodes} | {b.id for b in machine.bridges}
    for device, parent in machine.parents.items():
        fault = f"{device} hangs from unknown {parent}"
        require(parent in inner, where, fault, "parents are bridges or NUMA nodes")
    for device in machine.parents:
        visited, at = {device}, device
        while at in machine.parents:
            at = machine.parents[at]
            fault = f"the PCI tree turns in a circle at {at}"
            require(at not in visited, where, fault, "every branch ends at a CPU")
            visited.add(at)
    # 4. NVLinks.
    ends = {d.id for d in machine.devices if not isinstance(d, PciBridge | Nic)}
    right = "both ends are GPUs, NVLink switches or CPUs of this machine, and differ"
    for nvlink in machine.nvlinks:
        pair = {nvlink.source, nvlink.target}
        fault = f"an NVLink joins {nvlink.source} and {nvlink.target}"
        require(pair <= ends and len(pair) == 2, where, fault, right)
    return machine


# Knowledge, with provenance, and the machine file.


Provenance = Literal["measured", "published", "assumed", "reported"]
"""`reported` by the system (NVML, sysfs) or the user; `assumed` by nobody's measurement."""


class PeerAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The driver's answer about direct access from a GPU to another GPU."""

    source: int
    target: int
    supported: bool
    provenance: Provenance


class HiddenLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A path missing in the PCI tree, such as between two virtual switches of a chip."""

    one: str
    other: str
    provenance: Provenance
    note: str = ""


class Knowledge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about one machine; `peer_access_default` holds for unlisted pairs."""

    peer_access_default: bool = True
    peer_access_provenance: Provenance = "assumed"
    peer_access: tuple[PeerAccess, ...] = ()
    hidden_links: tuple[HiddenLink, ...] = ()
    links: tuple[LinkFact, ...] | msgspec.UnsetType = msgspec.UNSET
    """Pairs with P2P that no plan may use; unset where every link is taken for sound."""
    assumed_links: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """GPUs by id whose link to the slot is that of their cards, by name."""
    no_p2p_since: str | msgspec.UnsetType = msgspec.UNSET
    """Clauses on why P2P is assumed to lack where it is."""
    notes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Sentences on what the machine's description contradicts or leaves open."""

    def can_access(self, machine: Machine, source: int, target: int) -> bool:
        """Return whether a GPU can use another's memory directly; NVLinked ones always can."""
        for fact in self.peer_access:
            if (fact.source, fact.target) == (source, target):
                return fact.supported
        return self.peer_access_default or machine.has_nvlink(source, target)

    def may_use(self, machine: Machine, source: int, target: int) -> bool:
        """Return whether a GPU can use another's memory, and plans may use the link."""
        ends = {source, target}
        sound = all({fact.one, fact.other} != ends for fact in self.links or ())
        return sound and self.can_access(machine, source, target)

    def assumptions(self, machine: Machine) -> tuple[str, ...]:
        """Return what is assumed of a machine's structure, a sentence for each assumption."""
        nvlinks = (
            "no NVLinks: the file tells nothing of its GPUs but their places, and NCCL asks the "
            "driver for their NVLinks (so does `tccl discover` on the machine)"
        )
        notes = self.notes or ()
        return (*[nvlinks] * machine.nvlinks_unknown, *self.assumed_p2p(machine), *notes)

    def assumed_p2p(self, machine: Machine) -> tuple[str, ...]:
        """Return sentences on pairs of GPUs of which nobody said whether they have P2P, or ()."""
        reported = {(f.source, f.target) for f in self.peer_access if f.provenance != "assumed"}
        pairs = [pair for pair in permutations(machine.gpu_indices, 2) if pair not in reported]
        access = Counter(self.can_access(machine, *p) for p in pairs if not machine.has_nvlink(*p))
        if self.peer_access_provenance != "assumed":
            return ()
        how = "`nvidia-smi topo -p2p r` shows it, `tccl plan --p2p yes|no` sets it"
        whys = {False: f"; {self.no_p2p_since}" if self.no_p2p_since else "", True: ""}
        return tuple(
            f"{'' if yes else 'no '}P2P between {count} ordered pairs of GPUs without NVLink "
            f"({how}){whys[yes]}"
            for yes, count in sorted(access.items())
        )

    def with_p2p(self, machine: Machine, p2p: bool | None) -> Knowledge:
        """Return the knowledge with what the user says of P2P, None is nothing (InputError)."""
        if p2p is None:
            return self
        fault = f"is for machines whose P2P is not known; that of {machine.name} is"
        require(self.assumed_p2p(machine), "`p2p`", fault, "leave it out")
        return msgspec.structs.replace(
            self,
            peer_access_default=p2p,
            peer_access_provenance="reported",
            peer_access=tuple(f for f in self.peer_access if f.provenance != "assumed"),
            no_p2p_since=msgspec.UNSET,
        )


def check_knowledge(knowledge: Knowledge, machine: Machine, *, where: str) -> Knowledge:
    """Return `knowledge` if it names this machine's devices only (InputError)."""
    right = f"{machine.name} has no such GPU"
    pairs = [(fact.source, fact.target) for fact in knowledge.peer_access]
    pairs += [(fact.one, fact.other) for fact in knowledge.links or ()]
    for index in chain.from_iterable(pairs):
        require(index in machine.gpu_indices, where, f"speaks of GPU {index}", right)
    ids = {device.id for device in machine.devices}
    for link in knowledge.hidden_links:
        for end in (link.one, link.other):
            require(end in ids, where, f"a hidden link ends at {end}", "name a device or bus id")
    return knowledge


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a host's GPUs, driver and kernel; measurements hold for equal ones only."""

    gpu_uuids: tuple[str, ...]
    driver: str
    numa_count: int
    kernel: str

    def uuids(self, machine: Machine) -> dict[int, str]:
        """Return UUIDs by GPU index; a fingerprint has them in the machine's order of GPUs."""
        return dict(zip(machine.gpu_indices, self.gpu_uuids, strict=False))


class DiscoveredMachine(Machine, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A Machine with Knowledge and Fingerprint: the file format of `tccl discover`."""

    knowledge: Knowledge | msgspec.UnsetType = msgspec.UNSET
    fingerprint: Fingerprint | msgspec.UnsetType = msgspec.UNSET


def description_to_json(
    machine: Machine, knowledge: Knowledge | None = None, fingerprint: Fingerprint | None = None
) -> str:
    """Encode a machine's file; `tccl_py.load_machine` reads it."""
    fields = pick(machine, *Machine.__struct_fields__)
    description = DiscoveredMachine(
        **fields, knowledge=knowledge or msgspec.UNSET, fingerprint=fingerprint or msgspec.UNSET
    )
    return encode_json(description)
