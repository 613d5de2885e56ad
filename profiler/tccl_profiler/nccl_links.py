"""Links by NCCL: the communicators of one device, of two GPUs each, and their settings.

NCCL blocks until both members have joined, so a thread makes each communicator, one at a time,
while the environment names the graph file. NCCL reads most variables once in a process: all flows
of a set must agree on the workers' variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tccl_profiler.messages import Endpoint
from tccl_profiler.program import Carrier, Link
from tccl_profiler.protocol import LinkLost
from tccl_profiler.shared_memory import differing, write_pattern
from tccl_py.errors import MeasurementError
from tccl_py.files import temporary_folder
from tccl_py.nccl_library import Library

_SENDER, _RECEIVER = 0, 1
_FIRST_BYTES = 1 << 20
"""Bytes of the first collective, with which NCCL connects, and which is checked."""
_LIMIT_S = 60.0
"""NCCL loads, discovers the machine and connects within seconds; a busy one takes longer."""


@dataclass(frozen=True)
class Memory:
    """Memory for communicators: addresses of `size` bytes to send, and as many to keep.

    `copy(to, of, size)` copies to and from host memory, `enter` makes the device the calling
    thread's, and `settle` waits until all is done on `stream`, which has no other work (host memory
    has no streams).
    """

    sent: int
    kept: int
    size: int
    copy: Callable[[int, int, int], object] = ctypes.memmove
    enter: Callable[[], object] = lambda: None
    stream: int = 0
    settle: Callable[[], object] = lambda: None


class Communicators:
    """Makes and keeps the communicators of a device, kept for later sets.

    Methods raise LinkLost if NCCL fails, is late, or damages bytes. `gpu` is NCCL's number of the
    GPU.
    """

    def __init__(self, device: str, gpu: int, memory: Memory) -> None:
        self._device, self._gpu, self._memory = device, gpu, memory
        self._made: dict[Link, int] = {}
        self._ids: dict[Link, bytes] = {}
        self._making: tuple[Link, Future[int], float] | None = None

    def listen(self, links: Sequence[Link]) -> tuple[Endpoint, ...]:
        """Return the unique ids by which senders reach this device."""
        library = self._library
        for link in links:
            self._drop(link)
            self._ids[link] = library.unique_id()
        return tuple(Endpoint(addresses=(), token=self._ids[link]) for link in links)

    def connect(self, ends: Mapping[Link, Endpoint], limit_s: float) -> None:
        """Begin to be the sender of a link; `usable` waits for it."""
        ((link, end),) = ends.items()
        self._drop(link)
        self._begin(link, end.token, _SENDER, limit_s)

    def accept(self, links: Sequence[Link], limit_s: float) -> None:
        """Be the receiver of awaited links, and wait until bytes have arrived."""
        for link in links:
            self._begin(link, self._ids.pop(link), _RECEIVER, limit_s)
            self._settle()

    def usable(self) -> tuple[Link, ...]:
        """Return the usable links, after waiting for a pending communicator."""
        self._settle()
        for link in [link for link, made in self._made.items() if self._library.failure(made)]:
            self._drop(link)
        return tuple(self._made)

    def move(self, link: Link, size: int, stream: int, *, sends: bool) -> None:
        """Queue this end's part in moving bytes over a link."""
        made = self._made.get(link)
        if made is None:
            raise MeasurementError(f"{link} was not made")
        address = self._memory.sent if sends else self._memory.kept
        while size > 0:
            part = min(size, self._memory.size)
            self._library.collective("ncclBroadcast", address, part, made, stream)
            size -= self._memory.size

    def close(self) -> None:
        """End all communicators; twice does nothing more."""
        for link in list(self._made):
            self._drop(link)

    @cached_property
    def _library(self) -> Library:
        return Library()

    def _drop(self, link: Link) -> None:
        made = self._made.pop(link, None)
        if made is not None:
            with contextlib.suppress(MeasurementError):
                self._library.abort(made)

    def _begin(self, link: Link, unique_id: bytes, rank: int, limit_s: float) -> None:
        """Make a communicator in a thread; a daemon, as NCCL may wait for ever for its peer."""
        self._settle()
        making: Future[int] = Future()

        def make() -> None:
            try:
                making.set_result(self._member(link, unique_id, rank))
            except Exception as error:
                making.set_exception(error)

        threading.Thread(target=make, name="communicator", daemon=True).start()
        self._making = link, making, max(limit_s, _LIMIT_S)

    def _settle(self) -> None:
        """Wait for the communicator that is being made.

        Raises LinkLost if it could not be made; RuntimeError if the thread still waits within NCCL,
        and the process is of no more use.
        """
        if self._making is None:
            return
        (link, making, limit_s), self._making = self._making, None
        if not wait([making], limit_s).done:
            raise RuntimeError(f"{link}: NCCL made no communicator within {limit_s:g} s")
        try:
            self._made[link] = making.result()
        except Exception as error:
            raise LinkLost(f"{link}: {error}") from error

    def _member(self, link: Link, unique_id: bytes, rank: int) -> int:
        assert link.carrier is not None
        library, sends = self._library, rank == _SENDER
        self._memory.enter()
        with temporary_folder("tccl-graph-") as folder:
            path = folder / "graph.xml"
            path.write_text(graph_text(self._gpu, link.carrier, sends=sends))
            os.environ["NCCL_GRAPH_FILE"] = str(path)
            try:
                made = library.communicator(unique_id, rank=rank, channels=link.carrier.channels)
            finally:
                del os.environ["NCCL_GRAPH_FILE"]
        try:
            self._try(made, library, seed=1 + link.number, sends=sends)
        except BaseException:
            library.abort(made)
            raise
        return made

    def _try(self, made: int, library: Library, *, seed: int, sends: bool) -> None:
        memory, size = self._memory, min(_FIRST_BYTES, self._memory.size)
        data = np.zeros(size, np.uint8)
        here, address = data.ctypes.data, memory.sent if sends else memory.kept
        if sends:
            write_pattern(here, size, seed, 0)
        memory.copy(address, here, size)
        library.collective("ncclBroadcast", address, size, made, memory.stream)
        memory.settle()
        if not sends:
            memory.copy(here, address, size)
            if wrong := differing(here, size, seed, 0):
                raise MeasurementError(
                    f"{wrong} packs of 16 bytes arrived other than they were sent"
                )


_FARTHEST, _NEVER = "SYS", "LOC"


def process_variables(links: Collection[Link]) -> dict[str, str]:
    """Return variables of the workers of these links; MeasurementError if they contradict."""
    carriers = sorted({link.carrier for link in links if link.carrier is not None})
    if not carriers:
        return {}
    sizes = {carrier.fifo_bytes for carrier in carriers}
    into = {carrier.direct_in for carrier in carriers}
    out = {carrier.direct_out for carrier in carriers}
    if len(sizes) > 1:
        raise MeasurementError("NCCL has FIFOs of one size in a process, flows here have several")
    if len(into) > 1 or len(out) > 1 or (True in out and False in into):
        # GPU memory that a NIC reads and never writes is beyond NCCL's variables.
        raise MeasurementError(
            "NCCL lets NICs reach GPU memory by one rule in a process: all that receive alike, and "
            "all that send alike, directly only if those that receive do"
        )
    return {
        "NCCL_BUFFSIZE": str(sizes.pop()),
        "NCCL_NET_GDR_LEVEL": _FARTHEST if True in into else _NEVER,
        "NCCL_NET_GDR_READ": str(int(True in out)),
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        # Bytes leave a host by the NIC that is named, not by one beside another GPU.
        "NCCL_PXN_DISABLE": "1",
        "NCCL_CROSS_NIC": "1",
    }


def graph_text(gpu: int, carrier: Carrier, *, sends: bool) -> str:
    """Return one GPU's graph file with its NIC; NCCL doubles channels, up to the tree's number."""
    nic = carrier.nic_out if sends else carrier.nic_in
    count = (carrier.channels + 1) // 2
    net = f'      <net dev="{nic:#x}"/>\n'
    channel = f'    <channel>\n{net}      <gpu dev="{gpu:#x}"/>\n{net}    </channel>\n'
    ring, tree = (
        f'  <graph id="{number}" pattern="{pattern}" crossnic="0" nchannels="{count}"'
        ' speedintra="10" speedinter="10" latencyinter="0" typeintra="LOC" typeinter="SYS"'
        f' samechannels="1">\n{channel * count}  </graph>\n'
        for number, pattern in ((0, 4), (1, 3))
    )
    return f'<graphs version="1">\n{ring}{tree}</graphs>\n'
