"""The communicators of one device: of two GPUs each, made by a link's three steps, and kept.

NCCL waits inside its own call until both members are there, so that each is made by a thread. One
is made at a time: its graph file is named by the environment while it is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from tccl_profiler.messages import Endpoint, LinkLost
from tccl_profiler.program import Carrier, Link
from tccl_profiler.shared_memory import differing, write_pattern
from tccl_py.errors import MeasurementError
from tccl_py.nccl_library import Library
from tccl_py.temporary import temporary_folder

# What NCCL is told, so that a communicator of two GPUs does what a set of flows says.


_DROPPED = ("NCCL_GRAPH_FILE", "NCCL_IB_HCA", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")
"""A graph file's NICs are counted among those that NCCL uses: it must use all."""
_FARTHEST, _NEVER = "SYS", "LOC"
_GRAPHS = """<graphs version="1">
{ring}{tree}</graphs>
"""
_GRAPH = """  <graph id="{number}" pattern="{pattern}" crossnic="0" nchannels="{count}" \
speedintra="10" speedinter="10" latencyinter="0" typeintra="LOC" typeinter="SYS" samechannels="1">
{channels}  </graph>
"""
_CHANNEL = """    <channel>
      <net dev="{nic:#x}"/>
      <gpu dev="{gpu:#x}"/>
      <net dev="{nic:#x}"/>
    </channel>
"""
_RING, _TREE = (0, 4), (1, 3)
"""Id and pattern; a communicator has no more channels than its tree."""


def process_variables(links: Collection[Link]) -> dict[str, str]:
    """The variables of every worker that carries these links; none where NCCL carries none.

    Raises:
        MeasurementError: the flows would need several processes on a GPU: FIFOs of several sizes,
            or NICs of which some reach GPU memory and others do not.
    """
    carriers = sorted({link.carrier for link in links if link.carrier is not None})
    if not carriers:
        return {}
    sizes = {one.fifo_bytes for one in carriers}
    into, out = ({one.direct_in for one in carriers}, {one.direct_out for one in carriers})
    if len(sizes) > 1:
        raise MeasurementError("NCCL has FIFOs of one size in a process, flows here have several")
    if len(into) > 1 or len(out) > 1 or (True in out and False in into):
        # GPU memory that a NIC reads and never writes is beyond what NCCL's variables say.
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
        # Bytes that leave a host go by the NIC that is named, not by one beside another GPU.
        "NCCL_PXN_DISABLE": "1",
        "NCCL_CROSS_NIC": "1",
    }


def without_disturbance(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that contradict what is asked of NCCL."""
    return {name: value for name, value in environment.items() if name not in _DROPPED}


def graph_text(gpu: int, carrier: Carrier, *, sends: bool) -> str:
    """The graph file of one of the two GPUs: NCCL's number of it, and the NIC on its host.

    NCCL makes twice as many channels as a file has.
    """
    nic = carrier.nic_out if sends else carrier.nic_in
    count = (carrier.channels + 1) // 2
    channel = _CHANNEL.format(gpu=gpu, nic=nic)
    ring, tree = (
        _GRAPH.format(number=number, pattern=pattern, count=count, channels=channel * count)
        for number, pattern in (_RING, _TREE)
    )
    return _GRAPHS.format(ring=ring, tree=tree)


_SENDER, _RECEIVER = 0, 1
_FIRST_BYTES = 1 << 20
"""What is sent first, to see whether it arrives; NCCL connects with the first collective."""
_LIMIT_S = 60.0
"""NCCL loads, looks at the machine and connects within seconds; on a busy one within more."""


class Memory(Protocol):
    """The device's memory, as communicators need it: what is sent from, and kept in.

    Threads that make communicators call these while nothing else runs on the device.
    """

    sent: int
    kept: int
    size: int

    def enter(self) -> None:
        """Make the device the calling thread's."""

    def write(self, address: int, data: bytes) -> None:
        """Put bytes there."""

    def read(self, address: int, size: int) -> bytes:
        """The bytes that are there."""

    def stream(self) -> int:
        """A stream on which nothing is queued."""

    def settle(self) -> None:
        """Wait until that stream has done everything."""


class Communicators:
    """Makes and keeps them.

    Args:
        device: whose they are, `G0`.
        gpu: NCCL's number of it.
        memory: where bytes come from and go.
        library: how NCCL is loaded, when it is first needed.
    """

    def __init__(
        self,
        device: str,
        gpu: int,
        memory: Memory,
        *,
        library: Callable[[], Library] = Library,
    ) -> None:
        self._device, self._gpu, self._memory = device, gpu, memory
        self._load = library
        self._library: Library | None = None
        self._made: dict[Link, int] = {}
        self._ids: dict[Link, bytes] = {}
        self._making: tuple[Link, _Making] | None = None

    def listen(self, links: Sequence[Link]) -> tuple[Endpoint, ...]:
        """Say by what the senders of links meet this device."""
        library = self._loaded()
        for link in links:
            self._drop(link)
            self._ids[link] = library.unique_id()
        return tuple(Endpoint(address="", port=0, token=self._ids[link]) for link in links)

    def connect(self, ends: Mapping[Link, Endpoint], limit_s: float) -> None:
        """Begin to be the sender of a link; `usable` waits for it.

        Raises:
            MeasurementError: more than one at a time.
        """
        if len(ends) != 1:
            raise MeasurementError(f"{self._device}: communicators are made one at a time")
        ((link, end),) = ends.items()
        self._drop(link)
        self._begin(link, end.token, _SENDER, max(limit_s, _LIMIT_S))

    def accept(self, links: Sequence[Link], limit_s: float) -> None:
        """Be the receiver of links that were listened for, and wait until bytes have arrived.

        Raises:
            LinkLost: NCCL could not make it, or not in time, or bytes arrived wrong.
        """
        for link in links:
            self._begin(link, self._ids.pop(link), _RECEIVER, max(limit_s, _LIMIT_S))
            self._settle()

    def usable(self) -> tuple[Link, ...]:
        """The links that a run can use; waits for the one that is being made.

        Raises:
            LinkLost: as `accept`.
        """
        self._settle()
        for link in [one for one, made in self._made.items() if self._loaded().failure(made)]:
            self._drop(link)
        return tuple(self._made)

    def move(self, link: Link, size: int, stream: int, *, sends: bool) -> None:
        """Queue this end's part in moving bytes over a link.

        Raises:
            MeasurementError: there is no such link, or NCCL refuses.
        """
        made = self._made.get(link)
        if made is None:
            raise MeasurementError(f"{link} was not made")
        address = self._memory.sent if sends else self._memory.kept
        while size > 0:
            self._loaded().broadcast(address, min(size, self._memory.size), made, stream)
            size -= self._memory.size

    def close(self) -> None:
        """End all of them."""
        for link in list(self._made):
            self._drop(link)

    def _loaded(self) -> Library:
        if self._library is None:
            try:
                self._library = self._load()
            except MeasurementError as error:
                instead = "or measure the network by TCP: --network tcp"
                raise MeasurementError(f"{error}, {instead}") from error
        return self._library

    def _drop(self, link: Link) -> None:
        made = self._made.pop(link, None)
        if made is not None:
            with contextlib.suppress(MeasurementError):
                self._loaded().abort(made)

    def _begin(self, link: Link, unique_id: bytes, rank: int, limit_s: float) -> None:
        self._settle()
        making = _Making(lambda: self._member(link, unique_id, rank), limit_s)
        self._making = (link, making)
        making.start()

    def _settle(self) -> None:
        """Wait for what is being made."""
        if self._making is None:
            return
        (link, making), self._making = self._making, None
        self._made[link] = making.ended(link)

    def _member(self, link: Link, unique_id: bytes, rank: int) -> int:
        """Make one, and move some bytes over it."""
        assert link.carrier is not None
        library, sends = self._loaded(), rank == _SENDER
        self._memory.enter()
        with _graph_file(graph_text(self._gpu, link.carrier, sends=sends)):
            made = library.communicator(unique_id, rank=rank, channels=link.carrier.channels)
        try:
            self._try(made, library, seed=1 + link.number, sends=sends)
        except BaseException:
            library.abort(made)
            raise
        return made

    def _try(self, made: int, library: Library, *, seed: int, sends: bool) -> None:
        """See that bytes arrive as they were sent."""
        memory, size = self._memory, min(_FIRST_BYTES, self._memory.size)
        pattern = np.zeros(size, np.uint8)
        write_pattern(pattern.ctypes.data, size, seed, 0)
        address = memory.sent if sends else memory.kept
        memory.write(address, pattern.tobytes() if sends else bytes(size))
        library.broadcast(address, size, made, memory.stream())
        memory.settle()
        if not sends:
            found = np.frombuffer(memory.read(address, size), np.uint8).copy()
            wrong = differing(found.ctypes.data, size, seed, 0)
            if wrong:
                raise MeasurementError(
                    f"{wrong} packs of 16 bytes arrived other than they were sent"
                )


class LinkedByNccl:
    """The part of a `Device` that is about links, where NCCL carries what goes over them."""

    _communicators: Communicators | None = None

    @property
    def communicators(self) -> Communicators:
        """This device's.

        Raises:
            MeasurementError: it is not open.
        """
        if self._communicators is None:
            raise MeasurementError("this device is not open")
        return self._communicators

    def listen(self, links: Sequence[Link]) -> tuple[Endpoint, ...]:
        """See `Communicators`."""
        return self.communicators.listen(links)

    def connect(self, ends: Mapping[Link, Endpoint], limit_s: float) -> None:
        """See `Communicators`."""
        self.communicators.connect(ends, limit_s)

    def accept(self, links: Sequence[Link], limit_s: float) -> None:
        """See `Communicators`."""
        self.communicators.accept(links, limit_s)

    def usable(self) -> tuple[Link, ...]:
        """See `Communicators`."""
        return self.communicators.usable()

    def close_links(self) -> None:
        """End all communicators; twice does nothing more."""
        if self._communicators is not None:
            self._communicators.close()


class _Making:
    """A thread that makes a communicator, and what came of it."""

    def __init__(self, make: Callable[[], int], limit_s: float) -> None:
        self._make, self._limit_s = make, limit_s
        self._found: int | None = None
        self._failure: Exception | None = None
        # A daemon: NCCL may wait for ever for a member that is gone.
        self._thread = threading.Thread(target=self._run, name="communicator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._make()
        except Exception as error:
            self._failure = error

    def ended(self, link: Link) -> int:
        """What was made.

        Raises:
            LinkLost: nothing, and why.
            RuntimeError: the thread still waits inside NCCL, and the process is of no more use.
        """
        self._thread.join(self._limit_s)
        if self._thread.is_alive():
            raise RuntimeError(f"{link}: NCCL made no communicator within {self._limit_s:g} s")
        if self._failure is not None:
            raise LinkLost(f"{link}: {self._failure}") from self._failure
        assert self._found is not None
        return self._found


@contextlib.contextmanager
def _graph_file(text: str) -> Iterator[None]:
    """NCCL_GRAPH_FILE names a file of this text."""
    with temporary_folder("tccl-graph-") as folder:
        path = folder / "graph.xml"
        path.write_text(text)
        os.environ["NCCL_GRAPH_FILE"] = str(path)
        try:
            yield
        finally:
            del os.environ["NCCL_GRAPH_FILE"]
