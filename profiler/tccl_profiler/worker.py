"""A worker: one process that sets up one device, and then does what it is told until told to stop.

Started as `tccl_profiler.worker DESCRIPTOR`, a connected Unix socket to the controller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from tccl_profiler.messages import (
    Accept,
    AskLinks,
    Channel,
    ChannelClosed,
    Connect,
    Done,
    Endpoint,
    Failed,
    Linked,
    LinkLost,
    Listen,
    Listening,
    Meet,
    Peer,
    Ping,
    Pinged,
    Run,
    Share,
    Start,
    Started,
    Stop,
    ToWorker,
)
from tccl_profiler.program import Link
from tccl_profiler.shared_memory import Control, Segment
from tccl_py.errors import MeasurementError, TcclError
from tccl_py.limits import limit_reached

# What a worker needs of a device; a GPU and host memory both answer to it.


class Device(Protocol):
    """One device of one worker process. Every method may raise MeasurementError."""

    def open(self, start: Start, control: Control) -> tuple[Started, tuple[int, ...]]:
        """Set up memory and kernels; the second value are descriptors to send along."""

    def meet(self, peers: Mapping[str, tuple[Peer, int | None]]) -> None:
        """Map the other devices' arenas: by space, each with its descriptor or None.

        A peer that cannot be reached is refused when a program asks for it.
        """

    def share(self, space: str, segment: Segment) -> None:
        """Make host memory reachable for the device, in place of what had this name."""

    def queue(self, run: Run) -> None:
        """Clear the device's own counters and queue all repeats; returns before they have run."""

    def finish(self) -> None:
        """Wait until everything queued has run."""

    def ping(self, count: int) -> Pinged:
        """Compare the device's clock with CLOCK_MONOTONIC, `count` times; nothing else runs."""

    # Links to devices of other hosts, a NIC's or NCCL's: they stay from run to run.

    def listen(self, links: Sequence[Link]) -> tuple[Endpoint, ...]:
        """Begin to wait for links, and say where."""

    def connect(self, ends: Mapping[Link, Endpoint], limit_s: float) -> None:
        """Make links to where they are waited for."""

    def accept(self, links: Sequence[Link], limit_s: float) -> None:
        """Wait until links that are listened for have come."""

    def usable(self) -> tuple[Link, ...]:
        """The links that a run can use."""

    def close(self) -> None:
        """Give everything back."""


_ORPHANED = 3
"""Exit code of a worker whose controller went away."""


def main() -> None:
    """Serve the controller at the other end of the socket whose descriptor is argument 1."""
    # Ctrl-C reaches the whole process group; the controller decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel: Channel[ToWorker] = Channel(
        socket.socket(fileno=int(sys.argv[1])), receives=ToWorker, peer="the controller"
    )
    # ChannelClosed: the controller is gone or has closed the pool, and nobody is left to tell.
    with contextlib.suppress(ChannelClosed):
        _serve(channel)


def _serve(channel: Channel[ToWorker]) -> None:
    start, descriptors = channel.receive(None)
    if not isinstance(start, Start):
        raise MeasurementError("the first message is not Start")
    control_fd, lifeline = descriptors
    _die_with(lifeline)
    device: Device | None = None
    try:
        control = Control(Segment.attach(control_fd, start.control_bytes, "control"))
        device = _device(start.backend)
        started, fds = device.open(start, control)
        channel.send(started, fds)
        while _answer(channel, device):
            pass
    except ChannelClosed:
        raise
    except Exception as error:
        channel.send(Failed(what=_sentence(error)))
    finally:
        if device is not None:
            # What cannot be given back in order goes with the process.
            with contextlib.suppress(Exception):
                device.close()


def _die_with(lifeline: int) -> None:
    """End this process when the controller does, even while it is inside a driver's call."""

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _device(backend: str) -> Device:
    if backend == "host":
        from tccl_profiler.host.device import HostDevice  # noqa: PLC0415 (one backend is loaded)

        return HostDevice()
    if backend == "cuda":
        from tccl_profiler.cuda.device import CudaDevice  # noqa: PLC0415

        return CudaDevice()
    if backend == "network":
        from tccl_profiler.tcp import NicDevice  # noqa: PLC0415

        return NicDevice()
    raise MeasurementError(f"backend {backend!r} is not known; there are cuda and host")


def _answer(channel: Channel[ToWorker], device: Device) -> bool:
    """Do what one message asks; False after the last."""
    message, descriptors = channel.receive(None)
    try:
        if isinstance(message, Run):
            device.queue(message)
            device.finish()
            channel.send(Done())
        elif isinstance(message, Ping):
            channel.send(device.ping(message.count))
        elif isinstance(message, Share):
            device.share(message.space, Segment.attach(descriptors[0], message.size, message.space))
            channel.send(Done())
        elif isinstance(message, Meet):
            fds = {-1: None, **dict(enumerate(descriptors))}
            device.meet({peer.space: (peer, fds[peer.descriptor]) for peer in message.peers})
            channel.send(Done())
        elif not isinstance(message, Start | Stop):
            channel.send(_linked(device, message))
    except MeasurementError as error:
        # The device itself is sound: it refused, or what it is linked to has gone.
        channel.send(Failed(what=str(error), fatal=False, link=isinstance(error, LinkLost)))
    return not isinstance(message, Stop)


def _linked(
    device: Device, message: Listen | Connect | Accept | AskLinks
) -> Done | Listening | Linked:
    """What is answered about links."""
    if isinstance(message, Listen):
        return Listening(endpoints=device.listen(message.links))
    if isinstance(message, Connect):
        ends = dict(zip(message.links, message.endpoints, strict=True))
        device.connect(ends, message.limit_s)
    elif isinstance(message, Accept):
        device.accept(message.links, message.limit_s)
    else:
        return Linked(links=device.usable())
    return Done()


def _sentence(error: Exception) -> str:
    reached = limit_reached(error)
    if isinstance(error, TcclError) or reached is not None:
        return str(reached or error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    main()
