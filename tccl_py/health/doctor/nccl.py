"""Which NCCL is installed, and which rings it takes: a plan is for one version of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tccl_py.health.doctor.findings import Finding, Unseen
from tccl_py.health.doctor.host import Host
from tccl_py.nccl.asked import ring_words
from tccl_py.nccl.versions import known_versions, version_facts

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
