"""Links between GPUs: whether P2P that the driver grants carries data, and how that is known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

LinkState = Literal["broken", "not proven", "not measured"]
LinkVerdict = Literal["sound", "hangs", "wrong values", "fails", "not proven"]
ProofVerdict = Literal[
    "sound", "hangs", "wrong values", "slower than host memory", "host memory fails", "inconclusive"
]
BAD_VERDICTS: tuple[ProofVerdict, ...] = (
    "hangs",
    "wrong values",
    "slower than host memory",
    "host memory fails",
)


_LAST_GPU = re.compile(r"(.* at GPU )(\d+)", re.ASCII | re.DOTALL)


def joined_clauses(clauses: Iterable[str]) -> list[str]:
    """Return distinct clauses, those that differ in their last GPU as one.

    >>> joined_clauses(["nothing arrives at GPU 0", "nothing arrives at GPU 2"])
    ['nothing arrives at GPU 0, 2']
    """
    gpus: dict[str, list[str]] = {}
    for clause in clauses:
        match = _LAST_GPU.fullmatch(clause)
        begin, gpu = (match[1], match[2]) if match else (clause, "")
        if gpu not in gpus.setdefault(begin, []):
            gpus[begin].append(gpu)
    return [begin + ", ".join(of) for begin, of in gpus.items()]


class LinkFact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two GPUs whose P2P the driver grants and no plan may use, in either direction."""

    one: int
    other: int
    """The larger index."""
    state: LinkState
    """`broken`: it does not carry data, so NCCL fails over it. `not proven`: it was never tried,
    since trying may do harm. `not measured`: no transfer over it could be measured."""
    what: str = ""
    """A clause with the reason, as "nothing that GPU 1 writes arrives"."""
    verdict: LinkVerdict = "fails"
    """What NCCL does over a broken one."""


class PairProof(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"source": "from", "target": "to"},
):
    """One GPU's access to the memory of another one, by one way to map it."""

    source: int
    """The GPU that writes and reads."""
    target: int
    """The GPU whose memory it maps."""
    mapping: Literal["cuda-ipc", "cumem"]
    """CUDA IPC handles, or cuMem handles over POSIX file descriptors, as NCCL maps it."""
    verdict: LinkVerdict
    what: str = ""
    """A clause on what is wrong, as "nothing that GPU 1 writes arrives"; "" if sound."""
    write_gbps: float | None = None
    read_gbps: float | None = None
    """Rates of this pair alone, GB/s; None is not measured."""


class JobProof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job of the installed NCCL over all GPUs, whose values were compared."""

    environment: dict[str, str]
    """NCCL's variables; none for default NCCL, NCCL_P2P_DISABLE=1 for the control."""
    verdict: LinkVerdict
    """`fails` is an error of NCCL, as where no communicator can be created."""
    seconds: float
    what: str = ""
    """A clause on what is wrong, or NCCL's words."""
    gbps: tuple[float, ...] = ()
    """Bus bandwidth of the largest all-reduce in each repeat, GB/s."""


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was proven of the links between a host's GPUs: `links` in JSON."""

    verdict: ProofVerdict
    pairs: tuple[PairProof, ...] = ()
    common: str = ""
    """What broken pairs have in common, as "GPU 1"; "" where none is broken."""
    causes: tuple[str, ...] = ()
    """Sentences on what the host shows that fits, the likeliest first."""
    by_nccl: tuple[JobProof, ...] = ()
    what: str = ""
    """Why it is inconclusive, or the fault in a clause."""
    facts: tuple[LinkFact, ...] = ()
    """The pairs of GPUs that no plan may use."""
    conditions: dict[str, str] = {}
    """Driver, BIOS, kernel command line and GPUs under which it holds."""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `tccl doctor --json` says of a host, as far as other hosts and plans read it."""

    host: str
    """The host's name."""
    facts: dict[str, str]
    """What should be equal on all hosts of a cluster."""
    findings: tuple[dict[str, str], ...] = ()
    links: Proof | None = None
    """None with fewer than two GPUs, or where nothing was to run."""
