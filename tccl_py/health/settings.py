"""Checks of NCCL: variables in force, lines of nccl.conf that NCCL misreads, version and rings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from tccl_py.health.host import Finding, Host, Rule, Severity, Unseen
from tccl_py.nccl.asked import ring_words
from tccl_py.nccl.conf import CONF_VARIABLE, HOST_FILE, ConfLine, conf_lines
from tccl_py.nccl.versions import known_versions, version_facts

Found = Iterator[Finding | Unseen]

_PARSER = "NCCL 2.30.7, misc/param.cc: a line is NAME=VALUE as it stands"
_ORDER = "NCCL 2.30.7, misc/param.cc: the environment first, then ~/.nccl.conf, then /etc/nccl.conf"
_ENVIRONMENT = "the environment"
_SHOWN = 60
_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)

_COPY_ENGINES = "copy engines move data; no plan predicts them"
_BUFFER_NUMA = "decides the NUMA node of bounce buffers"
_EFFECTS: Mapping[str, tuple[Severity, str, str]] = {
    "NCCL_P2P_DISABLE": ("slow", "no GPU accesses another directly", "0"),
    "NCCL_SHM_DISABLE": (
        "slow", "GPUs without P2P communicate through the network stack, which is far slower", "0",
    ),
    "NCCL_ALGO": ("slow", "no planned ring runs with another algorithm than Ring", "Ring"),
    "NCCL_MAX_NCHANNELS": ("slow", "channels of a plan above this number are dropped", ""),
    "NCCL_IGNORE_DISABLED_P2P": ("note", "NCCL uses pairs that the driver calls broken", ""),
    "NCCL_TOPO_FILE": ("slow", "every communicator believes this file, on any machine", ""),
    "NCCL_P2P_LEVEL": ("note", "a plan chooses the pairs with direct access", ""),
    "NCCL_P2P_DIRECT_DISABLE": ("note", "changes the transport of GPUs of one process", "0"),
    "NCCL_P2P_READ_ENABLE": ("note", "reads or writes are part of a plan", ""),
    "NCCL_P2P_USE_CUDA_MEMCPY": ("slow", _COPY_ENGINES, "0"),
    "NCCL_SHM_USE_CUDA_MEMCPY": ("slow", _COPY_ENGINES, "0"),
    "NCCL_SHM_LOCALITY": ("note", "the place of bounce buffers is part of a plan", ""),
    "NCCL_BUFFSIZE": ("note", "the size of FIFOs is part of a plan", ""),
    "NCCL_MIN_NCHANNELS": ("note", "the number of channels is part of a plan", ""),
    "NCCL_NTHREADS": ("note", "a plan's rates are measured with NCCL's default threads", ""),
    "NCCL_PROTO": ("note", "large messages do not reach a plan's rate without Simple", ""),
    "NCCL_NET_DISABLE_INTRA": ("note", "a plan decides whether NICs carry traffic inside", ""),
    "NCCL_CUMEM_ENABLE": ("note", "changes the sharing of GPU memory", ""),
    "NCCL_CUMEM_HOST_ENABLE": ("note", _BUFFER_NUMA, ""),
    "NCCL_PROXY_CPUSET": ("note", _BUFFER_NUMA, ""),
    "NCCL_IGNORE_CPU_AFFINITY": ("note", "NCCL's threads leave their GPU's NUMA node", "0"),
}  # fmt: skip
"""Variables that change a plan: severity, effect, and the value without effect."""

_MISREAD = Rule("slow", "", "the setting has no effect, or another than intended", _PARSER)
_GRAPH = Rule(
    "hang",
    "",
    "every communicator over other GPUs than exactly the file's fails at its start",
    "NCCL 2.30.7, graph/search.cc: a GPU of the file that a communicator lacks fails it",
)
_JOB_FIX = "set it only in jobs that use exactly those GPUs: `tccl env DIR --gpus LIST`"
_HOST_FIX = "remove the line; `tccl env DIR --gpus LIST` sets it for one job"


def check_settings(host: Host) -> Found:
    """Report variables in force and misread lines of NCCL's files."""
    own = host.environment.get(CONF_VARIABLE) or f"{host.home}/.nccl.conf"
    lines = [
        line
        for path in (own, str(HOST_FILE))
        for line in conf_lines(host.data(path) or b"", where=path)
    ]
    for line in lines:
        yield from _misread(line)
    job = [
        ConfLine(name=name, value=value, where=_ENVIRONMENT)
        for name, value in host.environment.items()
    ]
    in_force: dict[str, ConfLine] = {}
    for line in (*job, *lines):
        if _NAME.fullmatch(line.name):
            in_force.setdefault(line.name, line)
    graph = in_force.get("NCCL_GRAPH_FILE")
    if graph is not None and graph.value:
        what, where = f"NCCL_GRAPH_FILE={_cut(graph.value)} is set", graph.where
        if where == _ENVIRONMENT:
            yield _GRAPH.at(where, severity="note", what=what, fix=_JOB_FIX)
        else:
            yield _GRAPH.at(where, what=f"{what} for all jobs of this host", fix=_HOST_FIX)
    for name, (severity, effect, harmless) in _EFFECTS.items():
        if name in in_force and in_force[name].value != harmless:
            yield _in_force(in_force[name], severity, effect)


def _misread(line: ConfLine) -> Found:
    """Report a line whose name or value NCCL takes otherwise than intended."""
    if "NCCL_" not in line.name:
        return
    if _NAME.fullmatch(line.name) is None:
        what = f"NCCL takes '{_cut(line.name)}' for the name, which it does not know"
        yield _MISREAD.at(line.where, what=what, fix="write NAME=VALUE without blanks or export")
    elif line.value != line.value.strip() or re.search(r"""^["']|["']$|\s#""", line.value):
        what = f"NCCL takes '{_cut(line.value)}' for the value of {line.name}"
        fix = "write no quotes, no blanks, no comment behind it, Unix line ends"
        yield _MISREAD.at(line.where, what=what, fix=fix)
    elif line.cut:
        what = f"NCCL cuts the value of {line.name} after {len(line.value)} characters"
        yield _MISREAD.at(line.where, what=what, fix="write a shorter value")


def _in_force(line: ConfLine, severity: Severity, effect: str) -> Finding:
    scope, fix = "it holds for every job that does not set it itself", "remove the line"
    if line.where == _ENVIRONMENT:
        scope, fix = "it overrides a plan's setting", f"unset {line.name}"
    return Finding(
        severity=severity,
        what=f"{line.name}={_cut(line.value)} is set",
        where=line.where,
        why=f"{effect}; {scope}",
        source=_ORDER,
        fix=fix,
    )


def _cut(text: str) -> str:
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# The installed NCCL

_VERSION = Rule(
    "note",
    "",
    "`tccl plan` plans for it unless --nccl names another; a plan is disabled under other versions",
    f"the library's own number; checked were {', '.join(known_versions())}",
)
_SECOND = Rule(
    "note",
    "",
    "a plan holds for one of the two, whichever a program loads",
    "a plan names its version of NCCL",
)
_OWN_RINGS = Rule(
    "note",
    "",
    "default NCCL runs these; a plan is compared with them",
    "NCCL's log of a start with its defaults",
)


def check_nccl(host: Host) -> Found:
    """Report the versions of NCCL that programs load here, torch's first."""
    if host.nccl is None:
        return
    if not host.nccl:
        yield Unseen(what="the NCCL of jobs", why="none was found; `tccl plan --nccl` names one")
        return
    first, *others = host.nccl
    facts = version_facts(first.version)
    unchecked = "" if facts.verified else f", not checked and treated as {facts.name}"
    yield _VERSION.at(first.source, what=f"NCCL {first.version} is installed{unchecked}")
    for second in others:
        if second.minor != first.minor:
            what = f"NCCL {second.version} is installed as well"
            fix = f"plan with --nccl {second.minor} for jobs with it"
            yield _SECOND.at(second.source, what=what, fix=fix)


def check_own_rings(host: Host) -> Found:
    """Report the rings, channels and transports that the installed NCCL takes by default."""
    found = host.own_rings
    if isinstance(found, str):
        if found:
            yield Unseen(what="the rings of default NCCL", why=found)
        return
    counts = Counter(way.via for way in found.ways)
    ways = ", ".join(f"{count} by {via}" for via, count in counts.most_common())
    what = f"NCCL {found.version} runs {ring_words(found)}; of its hops {ways}"
    where = f"a communicator over GPUs {', '.join(map(str, found.gpus))}"
    if found.fallback:
        why = "its search finds no rings and takes the order of the GPUs, whatever joins them"
        fix = "tccl plan -o my-plan"
        yield _OWN_RINGS.at(where, severity="slow", what=what, why=why, fix=fix)
    else:
        yield _OWN_RINGS.at(where, what=what)
