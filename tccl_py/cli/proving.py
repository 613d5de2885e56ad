"""The proof of this host's links, for `tccl doctor`, `advise` and `plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tccl_py.cli.process import notice
from tccl_py.errors import CTRL_C_AND_SIGTERM, InputError, interrupts_put_off
from tccl_py.health.proving import ProvenHost, prove_host
from tccl_py.model.cluster import parse_gpus
from tccl_py.model.links import Proof
from tccl_py.nccl.asked import AskedJob
from tccl_py.planning.opening import Prove


def proven_host(
    *,
    force: bool = False,
    gpus: str | None = None,
    plans: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> ProvenHost:
    """Return this host with a proof of its links, after a line that says what runs.

    `ready` is called when processes that measure may start.

    Raises InputError: what `plans` are for NCCL that fails here whatever the links.
    """
    chosen = None if gpus is None else parse_gpus(gpus, "`gpus`")
    with interrupts_put_off(CTRL_C_AND_SIGTERM):
        proven = prove_host(chosen, force=force, plans=plans, say=notice, ready=ready)
    links = proven.links
    if plans and links is not None:
        if links.verdict == "host memory fails":
            right = "; ".join((*links.causes, "`tccl doctor` has more")[:2])
            raise InputError("NCCL here", f"fails {links.what}", right)
        if links.verdict != "sound":
            notice(f"links: {links.verdict}: {links.what}")
    return proven


def prove_into(
    hosts: list[ProvenHost],
    *,
    force: bool = False,
    gpus: str | None = None,
    measured: bool = False,
) -> Prove:
    """Return what proves the links for a plan, and adds this host to `hosts`.

    Where sets were `measured` before, others need not be, and no process starts for them.
    """

    def prove(ready: Callable[[], None]) -> tuple[Proof | None, Sequence[AskedJob]]:
        early = {} if measured else {"ready": ready}
        hosts.append(proven_host(force=force, gpus=gpus, plans=True, **early))
        return hosts[-1].links, hosts[-1].jobs

    return prove
