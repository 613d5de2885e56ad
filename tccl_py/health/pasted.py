"""What pasted files say together: what NCCL did, why, what limits it, and what to try.

A file may have several kinds of text. NCCL's rules of the log's release decide what is right, on
the machine that NCCL printed, or on the one that the texts describe.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from statistics import median_high

import msgspec

from tccl_py.errors import InputError, require, size_text, spell
from tccl_py.files import MAX_INPUT_BYTES, read_text
from tccl_py.health.nccl_report import LogReport, fits_of, read_report, split_log
from tccl_py.model.cards import assume_p2p, link_words
from tccl_py.model.cluster import compress
from tccl_py.model.machine import Knowledge, Machine
from tccl_py.nccl.communicators import transport_of
from tccl_py.nccl.settings import settings_from_environment
from tccl_py.nccl.transport import pair_mechanism
from tccl_py.nccl.versions import ASSUMED, say_unchecked
from tccl_py.nccl.view import p2p_level, view
from tccl_py.readers.nvidia_smi import has_matrix, name_gpus
from tccl_py.readers.pasted import plain
from tccl_py.simulator.descriptions import Description, model_for, parse_description
from tccl_py.simulator.model import MachineModel
from tccl_py.workloads.nccl_log import ONE_FILE_A_RANK

STANDARD_INPUT = "-"
_OPENED, _CLOSED = "<system", "</system>"
_NUMBER = r"(\d{1,9}(?:\.\d{1,4})?)"
_ROW = re.compile(
    rf"(?<![\w.])(?P<bytes>\d{{1,15}})\s+\d{{1,15}}\s+[a-z]\w{{1,12}}\s+\w{{1,10}}\s+-?\d{{1,5}}\s+{_NUMBER}\s+"
    rf"{_NUMBER}\s+(?P<gbps>\d{{1,6}}\.\d{{1,4}})\s+(?P<wrong>\d{{1,15}}|N/A)"
    rf"(?:\s+{_NUMBER}\s+{_NUMBER}\s+(?P<in_place>\d{{1,6}}\.\d{{1,4}})\s+(?P<wrong_too>\d{{1,15}}|N/A))?"
    r"\s*$",
    re.ASCII,
)
_BEGUN = re.compile(r"^.{0,80}# nThread \d", re.MULTILINE)
_PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|broadcast|reduce|alltoall|sendrecv)_perf\b"
)
_TITLE = re.compile(
    r"\s*(?P<way>Uni|Bi)directional P2P=(?P<p2p>Enabled|Disabled).{0,60}Bandwidth.{0,60}", re.ASCII
)
_OTHERS = {
    "numactl": re.compile(r"^available: \d+ nodes? \(", re.MULTILINE),
    "ibstat": re.compile(r"^CA '", re.MULTILINE),
    "the kernel's log": re.compile(r"NVRM: |DMAR: "),
}
_WAYS = {"P2P": "by P2P", "SHM": "through host memory", "NET": "over the network"}
_RAW = 4 / 3
"""What a link carries at most, by NCCL's count of it."""
_SLACK = 1.05
_HALF = 0.5
_FEW_GBPS = 3.0
"""NCCL's count of 4 lanes of PCI Express 3."""
_NOTHING = "nothing that these files show: `tccl doctor` and `tccl plan` on the machine"
_P2P_PROOF = (
    "`tccl doctor` on the machine: P2P that the driver grants may carry no data (ACS, IOMMU); once "
    "with NCCL_P2P_DISABLE=1: if that runs, it is P2P"
)
_LINES = 12
_LINK_QUERY = (
    "add `nvidia-smi --query-gpu=index,name,pci.bus_id,pcie.link.gen.max,pcie.link.width.current,"
    "pcie.link.width.max --format=csv`: fewer lanes than the card has would explain it"
)
_IF_PROVEN = "where `nvidia-smi topo -p2p r` says OK and `tccl doctor` proves the links"
_DRIVERS_WORD = "`nvidia-smi topo -p2p r`: GNS or CNS is the driver's no; OK: `tccl doctor`"
_HEAD, _TRACE = 1 << 16, '"traceEvents"'
_MOST_PAIRS = 64 * 63


class TestedRate(msgspec.Struct, frozen=True, kw_only=True):
    """A row of nccl-tests: bus bandwidth, GB/s, and values that were wrong."""

    collective: str
    bytes: int
    gbps: float
    in_place_gbps: float | None
    wrong: int | None


class PairRate(
    msgspec.Struct, frozen=True, kw_only=True, rename={"source": "from", "target": "to"}
):
    """A cell of p2pBandwidthLatencyTest, GB/s, and what the links of the pair allow."""

    source: int
    target: int
    gbps: float
    both_ways: bool
    p2p: bool
    allowed_gbps: float | None


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What pasted files say; each sentence by itself."""

    used: tuple[str, ...]
    left_out: tuple[str, ...]
    log: LogReport | msgspec.UnsetType = msgspec.UNSET
    rates: tuple[TestedRate, ...] = ()
    pair_rates: tuple[PairRate, ...] = ()
    did: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    hung: bool = False
    """Whether nccl-tests began and no row follows, although communicators were made."""
    got: tuple[str, ...] = ()
    following: tuple[str, ...] = ()
    """What to try, the likeliest first."""
    sure: str = ""

    @property
    def tell(self) -> bool:
        """Whether there is more than a machine."""
        return bool(self.log or self.rates or self.pair_rates)

    def lines(self, most: int) -> Iterator[tuple[str, str]]:
        """Yield a name and a text for each line; of the longest parts the last are left out."""
        names = ("NCCL did", "Why", "Limit", "You got", "Try first", "How sure")
        sure = (self.sure,) if self.sure else ()
        parts = [self.did, self.why, self.limits, self.got, self.following, sure]
        while sum(map(len, parts)) > most:
            longest = max(parts, key=len)
            parts[parts.index(longest)] = longest[:-1]
        for name, texts in zip(names, parts, strict=True):
            yield from ((name, text) for text in texts)


class Pasted(msgspec.Struct, frozen=True, kw_only=True):
    """What files say, and the machine that they describe, if any."""

    findings: Findings
    description: Description | None

    @property
    def model(self) -> MachineModel | None:
        """The model of that machine."""
        found = self.description
        if found is None:
            return None
        return found.model or model_for(found.machine, found.knowledge)


def findings_lines(
    findings: Findings, before: Iterable[tuple[str, str]] = ()
) -> Iterator[tuple[str, str]]:
    """Yield at most twelve lines: those `before`, what files say, and which were used."""
    first = list(before)
    yield from first
    yield from findings.lines(_LINES - 1 - len(first))
    left = f"; left out: {'; '.join(findings.left_out)}" if findings.left_out else ""
    yield "Used", "; ".join(findings.used) + left


def read_pasted(names: Sequence[str]) -> Pasted:
    """Read files, `-` is standard input, of any kinds that people paste.

    InputError: one cannot be read, or no kind is known in any.
    """
    texts = {name: _read(name) for name in names}
    used: list[str] = []
    left: list[str] = []
    logs, others = [], []
    descriptions: list[Description] = []
    matrix_in = ""
    for name, text in texts.items():
        where = "standard input" if name == STANDARD_INPUT else name
        # 1. What is a file of its own: a machine in JSON or XML.
        kinds = []
        if text.lstrip()[:1] == "{" and _TRACE in text[:_HEAD]:
            raise InputError(where, "is a trace of PyTorch's profiler", "`tccl workload` reads it")
        before, opened, after = text.partition(_OPENED)
        inner, closed, after = after.partition(_CLOSED)
        if closed or text.lstrip("\ufeff \n")[:1] in ("{", "<"):
            one = opened + inner + closed if closed else text
            descriptions.append(parse_description(one, where=where))
            kinds.append("a topology file" if closed else "a machine")
        # 2. Texts, of which several files may have parts.
        log, rest = split_log(plain(before + after) if closed else "" if kinds else plain(text))
        logs.append(log)
        others.append(rest)
        found = {
            "nvidia-smi topo -m": has_matrix(rest),
            "NCCL's log": bool(log),
            "an nccl-tests table": next(_read_tests(rest), None) is not None,
            "p2pBandwidthLatencyTest": any(map(_TITLE.fullmatch, rest.splitlines())),
        }
        matrix_in = matrix_in or where * found["nvidia-smi topo -m"]
        kinds += [kind for kind, there in found.items() if there]
        used += [f"{where}: {', '.join(kinds)}"] if kinds else []
        left += [] if kinds else [f"{where}: no kind of text that is known"]
        left += [f"{where}: {kind}" for kind, sign in _OTHERS.items() if sign.search(rest)]
    text = "\n".join(others)
    if descriptions and matrix_in:
        left.append("the matrix of nvidia-smi, as a file of the machine says more")
    elif matrix_in:
        descriptions.append(parse_description(text, where=matrix_in))
        used.append(f"with it: {_around(descriptions[0])}")
    if len(descriptions) > 1:
        raise InputError(", ".join(names), "describe several machines", "which? give one of them")
    description = descriptions[0] if descriptions else None
    report = read_report("\n".join(logs)) if any(logs) else None
    if report is not None and report.machine is not None:
        named = name_gpus(report.machine, text)
        report = msgspec.structs.replace(report, machine=named)
    if report is not None and report.torn:
        left.append(f"{spell(report.torn, 'line')} torn into another's: {ONE_FILE_A_RANK}")
    machine = description.machine if description else report.machine if report else None
    rates, pairs = tuple(_read_tests(text)), tuple(_pairs(text, machine))
    if not (descriptions or report or rates or pairs):
        parse_description(text, where=names[0])  # Says what is missing.
    joined = report is not None and not report.unfinished
    findings = Findings(
        used=tuple(used),
        left_out=tuple(left),
        hung=joined and not rates and _BEGUN.search(text) is not None,
        log=report or msgspec.UNSET,
        rates=rates,
        pair_rates=pairs,
    )
    return Pasted(findings=_judge(findings, description), description=description)


def _around(description: Description) -> str:
    """Return what stands around a matrix and was used."""
    machine, knowledge = description.machine, description.knowledge
    assumed = knowledge.assumed_links or ()
    told = {
        "names": any(gpu.name for gpu in machine.gpus),
        "bus ids": not all(gpu.bus_id.startswith("ffff:") for gpu in machine.gpus),
        "links": any(gpu.link.gbps and gpu.id not in assumed for gpu in machine.gpus),
        "P2P": any(fact.provenance == "reported" for fact in knowledge.peer_access),
        "CPU": not machine.cpu_unknown,
    }
    return ", ".join(name for name, there in told.items() if there) or "nothing"


def _read(name: str) -> str:
    if name != STANDARD_INPUT:
        return read_text(Path(name))
    text = sys.stdin.read(MAX_INPUT_BYTES + 1)
    fault = f"has more than {MAX_INPUT_BYTES >> 20} MiB"
    require(len(text) <= MAX_INPUT_BYTES, "standard input", fault, "paste less")
    return text


def _read_tests(text: str) -> Iterator[TestedRate]:
    """Yield the rows of nccl-tests."""
    collective = ""
    for line in text.splitlines():
        if program := _PROGRAM.search(line):
            collective = program[1]
        if match := _ROW.search(line):
            wrong = [int(n) for n in (match["wrong"], match["wrong_too"]) if n and n.isdigit()]
            yield TestedRate(
                collective=collective or "not named",
                bytes=int(match["bytes"]),
                gbps=float(match["gbps"]),
                in_place_gbps=float(match["in_place"]) if match["in_place"] else None,
                wrong=max(wrong, default=None),
            )


def _pairs(text: str, machine: Machine | None) -> Iterator[PairRate]:
    """Yield the cells of matrices of bandwidth, without those of a GPU with itself."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        title = _TITLE.fullmatch(line)
        if title is None or number + 1 >= len(lines):
            continue
        columns = [int(word) for word in lines[number + 1].split()[1:] if word.isdecimal()]
        for row in lines[number + 2 : number + 2 + len(columns[:64])]:
            words = row.split()
            if len(words) != len(columns) + 1 or not words[0].isdecimal():
                break
            for target, word in zip(columns, words[1:], strict=True):
                source = int(words[0])
                if source != target and re.fullmatch(_NUMBER, word):
                    both = title["way"] == "Bi"
                    yield PairRate(
                        source=source,
                        target=target,
                        gbps=float(word),
                        both_ways=both,
                        p2p=title["p2p"] == "Enabled",
                        allowed_gbps=_limit_links(machine, source, target, 1 + both),
                    )


def _limit_links(machine: Machine | None, source: int, target: int, ways: int) -> float | None:
    """Return what the links of two GPUs without NVLink allow; None is not known."""
    if machine is None or not {source, target} <= {*machine.gpu_indices}:
        return None
    links = [machine.gpu(index).link.gbps for index in (source, target)]
    known = [gbps for gbps in links if gbps]
    joined = machine.has_nvlink(source, target)
    return round(ways * min(known), 1) if len(known) == len(links) and not joined else None


# Judgement.


def _judge(findings: Findings, description: Description | None) -> Findings:
    """Add the sentences to what was read."""
    log = findings.log or None
    machine = description.machine if description else log.machine if log else None
    did: list[str] = []
    why: list[str] = []
    limits: list[str] = []
    following: list[str] = []
    tested = bool(findings.rates)  # By ranks that were joined
    if log is not None:
        did = list(_did(log, tested=tested))
        if findings.hung:
            did.append(
                "its ranks were joined and no row follows: a collective hangs, or the paste ends"
            )
            by_p2p = any(transport_of(hop.via) == "P2P" for hop in log.hops)
            following = [_P2P_PROOF] if by_p2p else ["`tccl doctor` on the machine"]
        judged = log.machine or machine
        facts = description.knowledge.peer_access if description else ()
        told = {(f.source, f.target): f.supported for f in facts if f.provenance == "reported"}
        reasons = dict(_reasons(log, judged, told)) if judged else {}
        why = list(reasons)
        if not reasons and log.hops:
            why.append("not told: the log has no topology (NCCL_DEBUG_SUBSYS=INIT,GRAPH,ENV)")
        limits = list(_limits(log))
        following += [*_remedies(log, tested=tested), *(text for text in reasons.values() if text)]
    got = [*_got(findings, log, machine), *_pairs_got(findings, machine)]
    if any(
        pair.p2p and pair.gbps < _HALF * (pair.allowed_gbps or 0) for pair in findings.pair_rates
    ):
        following.append(_LINK_QUERY)
    sure = _sure(findings, log)
    return msgspec.structs.replace(
        findings,
        did=tuple(did),
        why=tuple(why),
        limits=tuple(limits),
        got=tuple(got),
        following=tuple(dict.fromkeys(following)) or (_NOTHING,) * findings.tell,
        sure=sure,
    )


def _did(log: LogReport, *, tested: bool) -> Iterator[str]:
    """Yield what NCCL did: release, ranks, rings, transports, and what did not end."""
    on = spell(log.ranks, "GPU" if len(log.hosts) < 2 else "rank")
    over = f" of {len(log.hosts)} hosts" if len(log.hosts) > 1 else ""
    parts = []
    if log.hops:
        kinds = Counter(
            transport_of(hop.via) for hop in {(h.source, h.target): h for h in log.hops}.values()
        )
        total = sum(kinds.values())
        names = {kind: _WAYS.get(kind, f"by {kind}") for kind in kinds}
        if len(kinds) == 1:
            (kind,) = kinds
            number = "both hops" if total == 2 else f"all {total} hops"
            parts.append(f"{number} {names[kind]}")
        else:
            ways = ", ".join(f"{n} {names[kind]}" for kind, n in kinds.items())
            parts.append(f"of {total} hops {ways}")
        parts[-1] += f" ({', '.join(sorted({hop.via for hop in log.hops})[:3])})"
    if log.rings:
        shown = " ".join(map(str, log.rings[0][:16])) + " ..." * (len(log.rings[0]) > 16)
        parts.append(f"{spell(log.channels, 'channel')}, ring {shown}")
    if log.simple_order:
        patterns = ", ".join(map(str, log.simple_order))
        parts.append(f"its graph search failed (pattern {patterns}: simple order)")
    if log.variables:
        parts.append("set: " + ", ".join(f"{v.name}={v.value} ({v.by})" for v in log.variables[:4]))
    parts += ["no tree"] if log.machine and not log.tree else []
    parts += [f"network {log.network}"] if log.network and len(log.hosts) > 1 else []
    release = log.version or "of unknown release"
    yield f"NCCL {release} on {on}{over}: {'; '.join(parts) or 'no rings in the log'}"
    for state in () if tested else log.unfinished:
        texts = []
        if state.begun:
            texts.append(f"rank {_ranks(state.begun)} of {state.ranks} never reached Init COMPLETE")
        if state.absent:
            texts.append(f"rank {_ranks(state.absent)} has no line, and the others wait for it")
        yield "; ".join(texts)
    if log.warnings:
        yield f"NCCL warned: {log.warnings[0]}"
    if log.choices:
        best = max(log.choices, key=lambda choice: choice.bytes)
        yield f"{best.collective} of {size_text(best.bytes)} took {best.algorithm} {best.protocol}"


def _ranks(ranks: Sequence[int]) -> str:
    return compress(map(str, ranks)).strip("[]")


def _reasons(
    log: LogReport, machine: Machine, reported: Mapping[tuple[int, int], bool]
) -> Iterator[tuple[str, str]]:
    """Yield why hops go as they do, by NCCL's rules, each with what to try or "".

    `reported` is the driver's word on P2P by pair of GPUs, where a text has it.
    """
    settings = settings_from_environment(log.values, version=log.version or ASSUMED)
    try:
        topo = view(machine, Knowledge(), settings)
    except InputError:
        return
    assumed = assume_p2p(machine)
    level = p2p_level(topo.system, settings).name
    names = ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE")
    by = next((variable for variable in log.variables if variable.name in names), None)
    source = f"by {by.name}={by.value} of the {by.by}" if by else "by default"
    told: set[object] = set()
    for hop in log.hops:
        pair = hop.source, hop.target
        if not {*pair} <= {*topo.gpus}:
            continue
        kind, allowed = transport_of(hop.via), pair_mechanism(topo, *pair) in ("write", "read")
        apart = topo.plain[f"G{hop.source}", f"G{hop.target}"].type.name
        granted = reported.get(pair, assumed.can_access(machine, *pair))
        if (kind, allowed, apart, granted) in told:
            continue
        told.add((kind, allowed, apart, granted))
        gpus = f"GPUs {hop.source} and {hop.target}"
        where = f"{gpus} are {apart} apart, and P2P goes up to {level} {source}"
        if kind == "NET":
            nearer = "a NIC is nearer to both than they are to each other"
            yield f"{gpus} use the network inside a host: {nearer}", "NCCL_NET_DISABLE_INTRA=1"
        elif kind == "P2P":
            yield where, ""
        elif not granted:
            no = f"the driver grants none: {assumed.no_p2p_since or 'the text says so'}"
            yield f"{where}; {no}", _DRIVERS_WORD
        elif not allowed and by is not None:
            yield f"{where} (P2P level)", f"take {by.name}={by.value} away"
        elif not allowed:
            level_rule = "P2P level: PXB, SYS on AMD with up to two GPUs"
            yield f"{where} ({level_rule})", f"NCCL_P2P_LEVEL=SYS, {_IF_PROVEN}"
        elif reported.get(pair):
            yield (
                f"{where}, which allows it, and the driver grants P2P: NCCL found that it does not "
                "work here, as in containers that hide the other GPU, or by its own check",
                "`tccl doctor` on the machine: it proves each link",
            )
        else:
            yield (
                f"{where}, which allows it: so the driver grants them no P2P (GeForce, two "
                "generations, a virtual machine), or NCCL found that it does not work",
                _DRIVERS_WORD,
            )
    if log.simple_order:
        yield (
            "graph search: no ring has bandwidth enough for its steps, so NCCL takes the ranks in "
            "their order and counts 0.1 GB/s (ncclTopoCompute)",
            "a graph file by `tccl plan` on the machine, after what limits it",
        )


def _limits(log: LogReport) -> Iterator[str]:
    """Yield what limits: links below the others, and the network of several hosts."""
    yield from _slow_uplinks(log)
    if len(log.hosts) > 1 and log.nets_gbps:
        nets = ", ".join(f"{name} {gbps:g}" for name, gbps in [*log.nets_gbps.items()][:8])
        yield f"hops between hosts: a host's NICs have {nets} GB/s by NCCL's count"
    if len(log.hosts) > 1 and log.network.startswith("Socket"):
        yield "hops between hosts go over sockets: no RDMA NIC was found or allowed"


def _slow_uplinks(log: LogReport) -> Iterator[str]:
    """Yield GPUs whose link to the CPU is far below the others', or has few lanes."""
    usual = median_high(log.uplinks_gbps.values()) if log.uplinks_gbps else 0.0
    widest = max(log.uplinks_gbps, key=log.uplinks_gbps.__getitem__, default="")
    most = log.uplinks_gbps.get(widest, 0.0)
    for rank, gbps in sorted(log.uplinks_gbps.items(), key=lambda item: item[1]):
        if gbps <= max(_HALF * usual, _FEW_GBPS):
            beside = f" where GPU {widest} has {most:g}" * (most > gbps)
            forms = " or ".join(fits_of(gbps)[-3:])
            yield (
                f"GPU {rank}'s uplink of {gbps:g} GB/s (PCI {gbps:g}{beside}), as "
                f"{forms or 'few lanes'}: the card is in a slot of 4 lanes or fewer, or its link "
                "is degraded"
            )


def _remedies(log: LogReport, *, tested: bool) -> Iterator[str]:
    """Yield what to try whatever the rules of transports say."""
    for state in () if tested else log.unfinished:
        if state.absent:
            yield (
                f"look at rank {_ranks(state.absent)}: it died, or did not create this "
                f"communicator ({ONE_FILE_A_RANK})"
            )
        else:
            yield "`tccl doctor` on each host: links that hang, or a firewall between hosts"
    if any(True for _ in _slow_uplinks(log)):
        yield "`sudo lspci -vv` of the slow card (LnkSta beside LnkCap): reseat it, or another slot"


def _got(findings: Findings, log: LogReport | None, machine: Machine | None) -> Iterator[str]:
    """Yield what nccl-tests measured, beside what the slowest link allows."""
    for rate in findings.rates:
        if rate.wrong:
            yield f"WRONG VALUES: {rate.wrong} in {rate.collective} of {size_text(rate.bytes)}"
            break
    if not findings.rates:
        return
    best = max(findings.rates, key=lambda rate: (rate.bytes, rate.gbps))
    text = f"{best.gbps:.1f} GB/s of busbw at {size_text(best.bytes)} ({best.collective})"
    allowed, whose = _slowest(log, (log.machine if log else None) or machine)
    if not allowed:
        yield text
    elif best.gbps > _SLACK * allowed:
        yield (
            f"{text}: more than the {allowed:.1f} GB/s that {whose} can carry, so the log and the "
            "table do not fit: of other machines or times, or the link was read wrongly"
        )
    else:
        yield f"{text}, {best.gbps / allowed:.0%} of the {allowed:.1f} GB/s that {whose} can carry"


def _slowest(log: LogReport | None, machine: Machine | None) -> tuple[float, str]:
    """Return what the slowest link of a ring carries, and its name; 0 is not known."""
    if log is not None and len(log.hosts) > 1:
        return sum(log.nets_gbps.values()), "a host's network"
    pairs = permutations(machine.gpu_indices, 2) if machine else ()
    if machine is None or all(machine.has_nvlink(*pair) for pair in pairs):
        return 0.0, ""
    if log is not None and log.machine is machine and log.uplinks_gbps:
        rank, gbps = min(log.uplinks_gbps.items(), key=lambda item: item[1])
        return gbps * _RAW, f"GPU {rank}'s uplink"
    known = [gpu for gpu in machine.gpus if gpu.link.gbps]
    if len(known) < len(machine.gpus):
        return 0.0, ""
    gpu = min(known, key=lambda gpu: gpu.link.gbps or 0.0)
    return gpu.link.gbps or 0.0, f"GPU {gpu.index}'s {link_words(gpu.link)}"


def _pairs_got(findings: Findings, machine: Machine | None) -> Iterator[str]:
    """Yield the slowest pair of each matrix, and P2P that is slower than host memory."""
    tables: dict[tuple[bool, bool], list[PairRate]] = {}
    for cell in findings.pair_rates:
        tables.setdefault((cell.p2p, cell.both_ways), []).append(cell)
    for (p2p, both), cells in sorted(tables.items(), reverse=True):
        least = min(cells, key=lambda cell: cell.gbps)
        text = f"{least.gbps:.1f} GB/s {'both ways' if both else 'one way'} between GPUs "
        text += f"{least.source} and {least.target} {'by P2P' if p2p else 'without P2P'}"
        if least.allowed_gbps and machine is not None:
            link = min(
                (machine.gpu(index).link for index in (least.source, least.target)),
                key=lambda link: link.gbps or 0.0,
            )
            share = least.gbps / least.allowed_gbps
            text += f", {share:.0%} of the {least.allowed_gbps:.1f} that {link_words(link)} allows"
        yield text
        without = {(c.source, c.target): c.gbps for c in tables.get((False, both), ())}
        slower = [
            c for c in cells if p2p and c.gbps < _HALF * without.get((c.source, c.target), 0.0)
        ]
        if slower:
            yield f"P2P is slower than host memory between {spell(len(slower), 'pair')} of GPUs"


def _sure(findings: Findings, log: LogReport | None) -> str:
    """Return on what the answer rests."""
    texts = []
    if log is not None:
        texts.append("what NCCL did is its own word")
        release = log.version or f"{ASSUMED} (assumed)"
        if log.hops:
            whose = "the machine that it printed" if log.machine else "the machine of the texts"
            texts.append(f"why is by the rules of NCCL {release} on {whose}, not asked of it")
            if log.version and (doubt := say_unchecked(log.version)):
                texts.append(doubt)
    if findings.rates or findings.pair_rates:
        texts.append("rates are as measured, links as counted")
    return "; ".join(texts)
