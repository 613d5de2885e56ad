"""Settings of NCCL that are already in force, and lines of its files that are not what they seem.

NCCL reads `NAME=VALUE` lines as they stand: a line that begins with `#` is a comment, everything
else before the first `=` is the name and everything after it the value, blanks and quotes included
(NCCL 2.30.7, misc/param.cc). The environment comes before ~/.nccl.conf, and that before
/etc/nccl.conf.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tccl_py.health.host import Finding, Host, Severity, Unseen
from tccl_py.nccl.asked import ring_words
from tccl_py.nccl.versions import known_versions, version_facts

_PARSER = "NCCL 2.30.7, misc/param.cc: a line is NAME=VALUE as it stands"
_ORDER = "NCCL 2.30.7, misc/param.cc: the environment first, then ~/.nccl.conf, then /etc/nccl.conf"
_GRAPHS = "NCCL 2.30.7, graph/search.cc: a GPU of the file that a communicator lacks fails it"
_MAX_LINES, _MAX_VALUE = 2000, 1023
_SHOWN = 60
_NAME = re.compile(r"NCCL_[A-Z0-9_]{1,60}", re.ASCII)


class _Effect(NamedTuple):
    """What a setting does to a plan; `harmless` is the value with which it does nothing."""

    severity: Severity
    why: str
    harmless: str = ""


_EFFECTS: Mapping[str, _Effect] = {
    "NCCL_P2P_DISABLE": _Effect("slow", "no GPU talks to another directly any more", "0"),
    "NCCL_SHM_DISABLE": _Effect(
        "slow", "GPUs without P2P talk through the network stack, which is far slower", "0"
    ),
    "NCCL_ALGO": _Effect("slow", "with another algorithm than Ring no planned ring runs", "Ring"),
    "NCCL_MAX_NCHANNELS": _Effect("slow", "channels of a plan above this number are dropped"),
    "NCCL_IGNORE_DISABLED_P2P": _Effect("note", "pairs that the driver calls broken are used"),
    "NCCL_TOPO_FILE": _Effect(
        "slow", "every communicator believes this file, whatever the machine is"
    ),
    "NCCL_P2P_LEVEL": _Effect("note", "which pairs talk directly is part of a plan"),
    "NCCL_P2P_DIRECT_DISABLE": _Effect("note", "how GPUs of one process talk is changed", "0"),
    "NCCL_P2P_READ_ENABLE": _Effect("note", "reads or writes are part of a plan"),
    "NCCL_P2P_USE_CUDA_MEMCPY": _Effect("slow", "copy engines move data; no plan predicts it", "0"),
    "NCCL_SHM_USE_CUDA_MEMCPY": _Effect("slow", "copy engines move data; no plan predicts it", "0"),
    "NCCL_SHM_LOCALITY": _Effect("note", "where bounce buffers lie is part of a plan"),
    "NCCL_BUFFSIZE": _Effect("note", "the size of FIFOs is part of a plan"),
    "NCCL_MIN_NCHANNELS": _Effect("note", "the number of channels is part of a plan"),
    "NCCL_NTHREADS": _Effect("note", "a plan's rates are measured with NCCL's own threads"),
    "NCCL_PROTO": _Effect("note", "without Simple, large messages do not reach a plan's rate"),
    "NCCL_NET_DISABLE_INTRA": _Effect("note", "whether NICs carry traffic inside is planned"),
    "NCCL_CUMEM_ENABLE": _Effect("note", "it changes how GPUs share memory"),
    "NCCL_CUMEM_HOST_ENABLE": _Effect("note", "it decides on which NUMA node bounce buffers lie"),
    "NCCL_PROXY_CPUSET": _Effect("note", "it decides on which NUMA node bounce buffers lie"),
    "NCCL_IGNORE_CPU_AFFINITY": _Effect("note", "NCCL's threads leave their GPU's NUMA node", "0"),
}


class _Setting(NamedTuple):
    name: str
    value: str
    where: str


def check_settings(host: Host) -> Iterator[Finding | Unseen]:
    """What the environment and NCCL's files set."""
    own = host.environment.get("NCCL_CONF_FILE") or f"{host.home}/.nccl.conf"
    lines = {path: _lines(host, path) for path in (own, "/etc/nccl.conf")}
    for found in lines.values():
        for setting in found:
            yield from _misread(setting)
    settings = [
        *(_Setting(name, value, "the environment") for name, value in host.environment.items()),
        *(setting for found in lines.values() for setting in found),
    ]
    effective: dict[str, _Setting] = {}
    for setting in settings:
        if _NAME.fullmatch(setting.name):
            effective.setdefault(setting.name, setting)
    yield from _graph(effective.get("NCCL_GRAPH_FILE"))
    for name, effect in _EFFECTS.items():
        if name in effective and effective[name].value != effect.harmless:
            yield _in_force(effective[name], effect)


def _lines(host: Host, path: str) -> list[_Setting]:
    """What a file sets, with its line."""
    text = (host.data(path) or b"").decode("utf-8", "replace")
    return [
        _Setting(*line.partition("=")[::2], f"{path}:{number}")
        for number, line in enumerate(text.split("\n")[:_MAX_LINES], start=1)
        if "=" in line and not line.startswith("#")
    ]


def _misread(setting: _Setting) -> Iterator[Finding]:
    name, value, where = setting
    if "NCCL_" not in name:
        return
    if _NAME.fullmatch(name) is None:
        what = f"NCCL takes {_cut(name)} for the name, which it does not know"
        yield _odd(where, what, "write NAME=VALUE without blanks, quotes or export")
    elif value != value.strip() or re.search(r"""^["']|["']$|\s#""", value):
        what = f"NCCL takes {_cut(value)} for the value of {name}"
        yield _odd(where, what, "write no quotes, no blanks, no comment behind it, Unix line ends")
    elif len(value) > _MAX_VALUE:
        what = f"the value of {name} is cut after {_MAX_VALUE} characters"
        yield _odd(where, what, "write a shorter one")


def _odd(where: str, what: str, mend: str) -> Finding:
    return Finding(
        severity="slow",
        check="settings",
        what=what,
        where=where,
        why="the setting does nothing, or something else than it seems to",
        source=_PARSER,
        mend=mend,
    )


def _graph(setting: _Setting | None) -> Iterator[Finding]:
    if setting is None or not setting.value:
        return
    job = setting.where == "the environment"
    yield Finding(
        severity="note" if job else "hang",
        check="settings",
        what=f"NCCL_GRAPH_FILE={_cut(setting.value, quote='')} is set"
        + ("" if job else " for all jobs of this host"),
        where=setting.where,
        why="every communicator over other GPUs than exactly the file's fails at its start",
        source=_GRAPHS,
        mend="set it only in jobs that use exactly those GPUs: `tccl env DIR --gpus LIST`"
        if job
        else "take the line out; `tccl env DIR --gpus LIST` sets it for one job",
    )


def _in_force(setting: _Setting, effect: _Effect) -> Finding:
    return Finding(
        severity=effect.severity,
        check="settings",
        what=f"{setting.name}={_cut(setting.value, quote='')} is set",
        where=setting.where,
        why=f"{effect.why}; a plan's own setting of it does not count beside it"
        if setting.where == "the environment"
        else f"{effect.why}; it holds for every job that does not set it itself",
        source=_ORDER,
        mend=f"unset {setting.name}"
        if setting.where == "the environment"
        else "take the line out, unless you know why it is there",
    )


def _cut(text: str, quote: str = "'") -> str:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"{quote}{shown}{quote}"


# Which NCCL is installed, and which rings it takes: a plan is for one version of it.


_WHY = "`tccl plan` plans for it where --nccl names no other; under another version a plan is off"


def check_nccl(host: Host) -> Iterator[Finding | Unseen]:
    """The versions of NCCL that programs load here, that of torch first."""
    if host.nccl is None:
        return
    if not host.nccl:
        what = "which NCCL jobs have"
        yield Unseen(check="nccl", what=what, why="none was found; `tccl plan --nccl` names one")
        return
    first = host.nccl[0]
    facts = version_facts(first.version)
    taken = "" if facts.verified else f", which was not checked and is taken for {facts.name}"
    yield Finding(
        severity="note",
        check="nccl",
        what=f"NCCL {first.version} is installed{taken}",
        where=first.source,
        why=_WHY,
        source=f"its makers' number; checked were {', '.join(known_versions())}",
    )
    for other in host.nccl[1:]:
        if other.minor != first.minor:
            yield Finding(
                severity="note",
                check="nccl",
                what=f"NCCL {other.version} is installed as well",
                where=other.source,
                why="whichever a program loads, a plan holds for one of the two",
                source="a plan names its version of NCCL",
                mend=f"plan with --nccl {other.minor} where jobs have that one",
            )


def check_own_rings(host: Host) -> Iterator[Finding | Unseen]:
    """Yield the rings, channels and transports that the installed NCCL takes by default."""
    found = host.own_rings
    if isinstance(found, str):
        if found:
            yield Unseen(check="nccl-rings", what="which rings NCCL takes by itself", why=found)
        return
    counts = Counter(way.via for way in found.ways)
    ways = ", ".join(f"{count} by {via}" for via, count in counts.most_common())
    yield Finding(
        severity="slow" if found.fallback else "note",
        check="nccl-rings",
        what=f"NCCL {found.version} runs {ring_words(found)}; of its hops {ways}",
        where=f"a communicator over GPUs {', '.join(map(str, found.gpus))}",
        why=(
            "its search finds no rings and takes the order of the GPUs, whatever joins them"
            if found.fallback
            else "default NCCL runs these; a plan is compared with them"
        ),
        source="NCCL's own log: it was started here with its defaults",
        mend="tccl plan -o my-plan" if found.fallback else "",
    )
