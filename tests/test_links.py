"""The verdict on links: random machines with random faults, by brute force, and each rule."""

import random
from itertools import combinations, permutations
from pathlib import Path

import msgspec

from tccl_py.health.checks import device_errors
from tccl_py.health.host import DriverState, HostState
from tccl_py.health.proving import judge_links, pcie_p2p_may_harm
from tccl_py.model.links import JobProof, PairProof
from tccl_py.model.machine import Gpu, Knowledge, Machine, NumaNode, PciBridge, PeerAccess
from tccl_py.nccl.settings import settings_from_environment
from tccl_py.nccl.transport import pair_mechanism
from tccl_py.nccl.view import view
from tccl_py.readers.nccl_topology import parse_nccl_topology
from tests.random_machines import random_machine
from tests.recorded_hosts import pci, recorded, write

CONTROL, SYS = {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_LEVEL": "SYS"}
SAMPLE = 60
"""Of 1,000 seeds, all of which hold."""


def job(environment=None, verdict="sound", gbps=(), what=""):
    return JobProof(
        environment=environment or {}, verdict=verdict, seconds=1.0, gbps=gbps, what=what
    )


def proofs(pairs, broken=(), verdict="hangs", one_way=False):
    """Both directions and mappings of each pair; those of broken pairs are bad."""
    return [
        PairProof(
            source=source,
            target=target,
            mapping=mapping,
            verdict=verdict
            if (min(source, target), max(source, target)) in broken
            and not (one_way and source > target)
            else "sound",
        )
        for pair in pairs
        for source, target in (pair, pair[::-1])
        for mapping in ("cuda-ipc", "cumem")
    ]


def direct(machine, granted, environment):
    """Pairs that NCCL joins by P2P under these variables."""
    access = [
        PeerAccess(
            source=s,
            target=t,
            supported=(min(s, t), max(s, t)) in granted,
            provenance="reported",
        )
        for s, t in permutations(machine.gpu_indices, 2)
    ]
    knowledge = Knowledge(peer_access=tuple(access))
    topo = view(machine, knowledge, settings_from_environment(environment))
    return {p for p in combinations(topo.gpus, 2) if pair_mechanism(topo, *p) in ("read", "write")}


def jobs_on(machine, granted, broken, verdict="hangs"):
    """What NCCL meets where these pairs are broken."""
    return [
        job(environment, verdict if direct(machine, granted, environment) & broken else "sound")
        for environment in ({}, CONTROL, SYS)
    ]


def way(machine, one, other):
    """The parts that a path over PCIe passes, by walking up from both ends."""
    first, second = ([*machine.ancestors(f"G{g}")] for g in (one, other))
    while len(first) > 1 and len(second) > 1 and first[-2:] == second[-2:]:
        first.pop(), second.pop()
    return {*first, *second}


def parts(machine, granted):
    """Each part that may be faulty, with its pairs."""
    linked = {p for p in granted if machine.has_nvlink(*p)}
    pci = granted - linked
    ways = {p: way(machine, *p) for p in pci}
    names = {b.id: f"the PCI switch {b.id}" for b in machine.bridges}
    names |= {n.id: f"NUMA node {n.numa_id}" for n in machine.numa_nodes}
    nodes = {n.id for n in machine.numa_nodes}
    inside = {
        part: {g for g in machine.gpu_indices if part in machine.ancestors(f"G{g}")}
        for part in names
    }
    pairs = {f"GPU {g}": {p for p in granted if g in p} for g in machine.gpu_indices}
    pairs |= {f"GPU {g} over PCIe": {p for p in pci if g in p} for g in machine.gpu_indices}
    for part, gpus in inside.items():
        through = "all pairs through the CPU of " if part in nodes else ""
        pairs[through + names[part]] = {p for p in pci if part in ways[p]}
        out = {p for p in pci if (p[0] in gpus) != (p[1] in gpus)}
        pairs[f"the link from {names[part]} to the CPUs"] = out
    for one, other in combinations(names, 2):
        if not inside[one] & inside[other]:
            between = {tuple(sorted((a, b))) for a in inside[one] for b in inside[other]}
            pairs[f"all pairs between {names[one]} and {names[other]}"] = between & pci
    pairs["all pairs between NUMA nodes"] = {p for p in pci if len(ways[p] & nodes) > 1}
    pairs["all pairs through a CPU"] = {p for p in pci if ways[p] & nodes}
    pairs |= {"all P2P over PCIe": pci, "all P2P over NVLink": linked, "all P2P": granted}
    return pairs


def fault(rng, machine, granted):
    """A kind of fault, and its pairs: none, pairs, GPUs, a part, or all."""
    kind = rng.choice(("none", "pairs", "GPU", "GPUs", "part", "part", "all"))
    if kind == "none":
        return kind, set()
    if kind == "pairs":
        return kind, set(rng.sample(sorted(granted), min(len(granted), rng.randint(1, 3))))
    if kind == "all":
        return kind, granted
    if kind == "part":
        return kind, rng.choice([*parts(machine, granted).values()])
    count = 1 if kind == "GPU" else rng.randint(2, max(2, len(machine.gpus) - 2))
    gpus = {*rng.sample(machine.gpu_indices, min(count, len(machine.gpus)))}
    return kind, {p for p in granted if gpus & {*p}}


def fewest_gpus(machine, granted, broken):
    """The least number of GPUs whose pairs are exactly the broken ones; None if there is none."""
    for count in range(1, len(machine.gpus)):
        for gpus in combinations(machine.gpu_indices, count):
            if {p for p in granted if {*gpus} & {*p}} == broken:
                return count
    return None


def check_random_machine(seed):
    rng = random.Random(seed)
    text, _ = random_machine(rng, gpus=rng.randint(2, 8))
    machine = parse_nccl_topology(text, where="a test")
    every = {*combinations(machine.gpu_indices, 2)}
    granted = {p for p in every if machine.has_nvlink(*p)} if rng.random() < 0.15 else every
    if not granted:
        return
    _, broken = fault(rng, machine, granted)
    bad = rng.choice(("hangs", "wrong values"))
    evidence = proofs(granted, broken, bad, one_way=rng.random() < 0.5)
    proof = judge_links(evidence, jobs_on(machine, granted, broken, bad), machine, host=None)
    assert proof.verdict == (bad if broken else "sound")
    assert {(f.one, f.other) for f in proof.facts if f.state == "broken"} == broken
    # What a job did counts more than a pair.
    jobs = {job.verdict for job in proof.by_nccl} - {"sound", "not proven"}
    assert not jobs or {f.verdict for f in proof.facts if f.state == "broken"} <= jobs
    if not broken:
        assert proof.common == "" == proof.what
        return
    # The part has exactly the broken pairs, and no single part is passed over for several.
    same = [name for name, pairs in parts(machine, granted).items() if pairs == broken]
    one_gpu = [name for name in same if name.startswith("GPU ")]
    words = proof.common.partition(" ")[2].split(", ")
    fewest = fewest_gpus(machine, granted, broken)
    if len(broken) == 1:
        assert proof.common == "the pair of GPUs {} and {}".format(*next(iter(broken)))
    elif same:
        assert proof.common in (one_gpu or same)
    elif fewest:
        assert len(words) == fewest
        assert {p for p in granted if {*map(int, words)} & {*p}} == broken
    else:
        shown = {tuple(map(int, word.split(" and ")[0].split("-"))) for word in words}
        assert proof.common.startswith("pairs")
        assert shown == broken or (shown < broken and f"and {len(broken) - 6} more" in words[-1])


def test_the_verdict_names_exactly_the_faulty_part_or_the_smallest_that_explains_it():
    for seed in range(SAMPLE):
        check_random_machine(seed)


# Rules, on four GPUs below two switches: NCCL joins those of one switch by P2P, and by
# NCCL_P2P_LEVEL=SYS all.

BUS_IDS = ("0000:43:00.0", "0000:44:00.0", "0000:83:00.0", "0000:84:00.0")
SWITCHES = ("0000:41:00.0", "0000:81:00.0")
MACHINE = Machine(
    name="a test",
    numa_nodes=tuple(NumaNode(index=i, numa_id=i, vendor="GenuineIntel") for i in range(2)),
    bridges=tuple(PciBridge(bus_id=SWITCHES[i], parent=f"C{i}") for i in range(2)),
    gpus=tuple(
        Gpu(index=i, bus_id=bus_id, parent=SWITCHES[i // 2]) for i, bus_id in enumerate(BUS_IDS)
    ),
)
ALL = {*combinations(range(4), 2)}
NEAR = {(0, 1), (2, 3)}
HANGS = [job(verdict="hangs", what="in its first collective"), job(CONTROL), job(SYS, "hangs")]


def judged(broken=(), jobs=None, *, pairs=ALL, host=None, machine=MACHINE, **more):
    evidence = proofs(pairs, broken)
    jobs = jobs_on(machine, ALL, {*broken}) if jobs is None else jobs
    return judge_links(evidence, jobs, machine, host=host, **more)


def facts(proof):
    return {(fact.one, fact.other): fact.state for fact in proof.facts}


def test_jobs_that_fail_with_p2p_alone_bring_their_pairs_under_suspicion():
    proof = judged(jobs=HANGS)
    assert (proof.verdict, facts(proof)) == ("hangs", dict.fromkeys(NEAR, "broken"))
    proof = judged(jobs=[job(), job(CONTROL), job(SYS, "wrong values")])
    assert proof.verdict == "wrong values"
    assert facts(proof) == dict.fromkeys(ALL - NEAR, "broken")
    assert proof.common == "all pairs between the PCI switch {} and the PCI switch {}".format(
        *SWITCHES
    )
    # Without any P2P, and without a control, nothing is known of links.
    proof = judged(jobs=HANGS, pairs=(), host=without_p2p())
    assert (proof.verdict, proof.facts) == ("hangs", ())
    proof = judged(jobs=[HANGS[0], job(SYS, "hangs")])
    assert (proof.verdict, proof.facts) == ("inconclusive", ())


def without_p2p():
    access = [
        PeerAccess(source=s, target=t, supported=False, provenance="reported")
        for s, t in permutations(range(4), 2)
    ]
    return HostState(root=Path("/nowhere"), driver=DriverState(peer_access=tuple(access)))


def test_links_that_default_nccl_does_not_use_are_broken_all_the_same():
    proof = judged({(0, 2)})
    assert (proof.verdict, facts(proof)) == ("hangs", {(0, 2): "broken"})
    assert "default NCCL does not use" in proof.what


def test_a_mapping_that_is_refused_breaks_no_pair_where_the_other_one_works():
    refused = [
        msgspec.structs.replace(proof, verdict="fails" if proof.mapping == "cumem" else "sound")
        for proof in proofs(ALL)
    ]
    jobs = jobs_on(MACHINE, ALL, set())
    assert judge_links(refused, jobs, MACHINE, host=None).verdict == "sound"


def test_where_nothing_runs_without_p2p_either_host_memory_comes_first(tmp_path):
    jobs = [job(verdict="fails"), job(CONTROL, "fails", what="No space left on device")]
    proof = judged(jobs=jobs, host=recorded("container", tmp_path))
    assert (proof.verdict, proof.facts, proof.common) == ("host memory fails", (), "")
    assert "No space left" in proof.what
    assert "--shm-size" in proof.causes[0]
    # What default NCCL does not need is no fault of its links.
    assert judged(jobs=[job(), jobs[1], job(SYS)]).verdict == "sound"


def test_p2p_is_slower_than_host_memory_beyond_both_intervals_only():
    def verdict(own, other):
        return judged(jobs=[job(gbps=own), job(CONTROL, gbps=other), job(SYS)]).verdict

    slow, fast = (3.0, 3.1, 3.2, 3.3), (5.0, 5.1, 5.2, 5.3)
    assert verdict(slow, fast) == "slower than host memory"
    assert verdict(fast, slow) == verdict(slow, (3.3, *fast)) == "sound"
    assert verdict(slow[:3], fast) == "sound"


def test_what_was_not_tried_makes_no_broken_link(tmp_path):
    assert judged(unable="GPU 1 is in use by process 7").verdict == "inconclusive"
    assert judged(jobs=[job(CONTROL)]).verdict == "inconclusive"
    late = [job(verdict="not proven", what="the time was up"), job(CONTROL)]
    assert judged(jobs=late).facts == ()
    host = recorded("amd-as-it-came", tmp_path)
    proof = judged(jobs=[job()], pairs=NEAR, host=host, withheld=sorted(ALL - NEAR))
    assert proof.verdict == "inconclusive"
    assert facts(proof) == dict.fromkeys(ALL - NEAR, "not proven")
    assert proof.what == pcie_p2p_may_harm(host) == proof.facts[0].what
    # A fault that was seen is no doubt.
    assert judged({(0, 1)}, unable="GPU 3 is in use").verdict == "hangs"


def test_a_cause_is_what_concerns_the_broken_pairs_and_no_others(tmp_path):
    host = recorded("amd-as-it-came", tmp_path)
    two = msgspec.structs.replace(MACHINE, gpus=MACHINE.gpus[:2])
    proof = judged({(0, 1)}, pairs={(0, 1)}, host=host, machine=two)
    assert proof.causes == (pcie_p2p_may_harm(host),)
    # All four with one of them broken: the port's counters, and not what others pass as well.
    write(tmp_path, f"sys/bus/pci/devices/{BUS_IDS[0]}/aer_dev_fatal", "DLP 2\nTOTAL_ERR_FATAL 2\n")
    over = {pair for pair in ALL if 0 in pair}
    proof = judged(over, host=host)
    assert proof.common == "GPU 0"
    assert "fatal errors of PCIe: 2" in proof.causes[0]
    proof = judged({(2, 3)}, host=recorded("clean", tmp_path / "clean"))
    assert proof.causes == ("nothing that the host shows explains it",)


def test_p2p_over_pcie_may_harm_where_an_iommu_translates(tmp_path):
    assert pcie_p2p_may_harm(recorded("clean", tmp_path / "clean")) == ""
    assert "ACS of 0000:40:01.1" in pcie_p2p_may_harm(recorded("amd-as-it-came", tmp_path / "amd"))
    pci(tmp_path, "0000:00:01.1/0000:01:00.0", "vendor=0x10de", "class=0x030000", "iommu=3")
    write(tmp_path, "sys/kernel/iommu_groups/3/type", "DMA\n")
    assert pcie_p2p_may_harm(HostState(root=tmp_path)).startswith("the IOMMU translates")


def test_the_kernels_log_names_gpus_that_failed_and_transfers_that_the_iommu_stopped(tmp_path):
    host = recorded("amd-as-it-came", tmp_path)
    log = (
        "[1.0] NVRM: Xid (PCI:0000:44:00): 79, pid=1, GPU has fallen off the bus.\n"
        "[2.0] NVRM: Xid (PCI:0000:43:00): 13, pid=2, a program's own fault\n"
        "[3.0] nvidia 0000:43:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:43:00.0 "
        "domain=0x001e address=0x1 flags=0x20]\n"
        "[4.0] DMAR: [DMA Write NO_PASID] Request device [43:00.0] fault addr 0x1\n"
    )
    write(tmp_path, "var/log/dmesg", log)
    assert device_errors(host) == {
        "0000:43:00.0": "faults of the IOMMU (AMD-Vi): 1, faults of the IOMMU (DMAR): 1",
        "0000:44:00.0": "Xid 79: 1",
    }
