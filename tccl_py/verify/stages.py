"""What tuning tries, and in which order.

Channels and FIFO size first, because most follows from the footprint of all FIFOs; then, with the
best of those, Ring alone, and P2P levels or where bytes land between GPUs and NICs; last who holds
a bounce's buffer, reads instead of writes, and copy engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from tccl_py.model.transfer import DEFAULT_FIFO_BYTES
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.versions import version_facts
from tccl_py.plan.plan import ChoiceName
from tccl_py.verify.tunable import Tunable

BUFFSIZES = (DEFAULT_FIFO_BYTES, 512 << 10)
MORE_BUFFSIZES = (256 << 10, 1 << 20, 128 << 10)
"""Tried with the best number of channels only: each job takes seconds."""

Stage = Callable[[Settings], Iterator[Settings]]
"""Settings to try, given the best until then."""


def stages(plan: Tunable, name: ChoiceName) -> tuple[Stage, ...]:
    """Return what is tried for a choice, a stage after the other."""
    facts = version_facts(plan.choices[name].version)

    def sizes(base: Settings) -> Iterator[Settings]:
        for count in plan.channels(name):
            # NCCL doubles the channels of a file, and of its own search.
            asked: dict[str, object] = {"channels": count}
            if name == "variables":
                asked = {"min_channels": 2 * count if count > base.channels else None}
            if count <= facts.max_channels:
                for size in BUFFSIZES:
                    yield _valid(base, **asked, buffsize=size)

    def more_sizes(base: Settings) -> Iterator[Settings]:
        for size in MORE_BUFFSIZES:
            yield _valid(base, buffsize=size)

    def algorithm_and_paths(base: Settings) -> Iterator[Settings]:
        yield _valid(base, algo=None if base.algo else "Ring")
        yield from map(check_settings, plan.other_paths(name, base))

    def mechanisms(base: Settings) -> Iterator[Settings]:
        kinds = plan.kinds(name, base)
        if "bounce" in kinds:
            side = "sender" if base.shm_locality == "receiver" else "receiver"
            yield _valid(base, shm_locality=side)
        if kinds & {"read", "write"}:
            yield _valid(base, p2p_read="read" not in kinds)
        if "bounce" in kinds and facts.shm_copy_engine:
            yield _valid(base, shm_copy_engine="both")
        if kinds & {"read", "write"} and facts.p2p_copy_engine:
            yield _valid(base, p2p_copy_engine=True)

    return sizes, more_sizes, algorithm_and_paths, mechanisms


def _valid(base: Settings, **changes: object) -> Settings:
    return check_settings(msgspec.structs.replace(base, **changes))
