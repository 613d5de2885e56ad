"""The worker process: it opens one device and serves the controller until told to stop.

Started as `tccl_profiler.worker DESCRIPTOR`, a connected Unix socket to the controller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Protocol

from tccl_profiler.messages import (
    Connection,
    ConnectionClosed,
    Done,
    Failed,
    LinkSet,
    LinkStep,
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
    take_step,
)
from tccl_profiler.shared_memory import Control, Segment
from tccl_py.errors import MeasurementError

_ORPHANED = 3
"""Exit code of a worker whose controller went away."""


class Device(Protocol):
    """The device of a worker process. Every method may raise MeasurementError."""

    @property
    def links(self) -> LinkSet:
        """The device's links to other hosts, made by TCP or NCCL."""

    def open(self, start: Start, control: Control) -> tuple[Started, tuple[int, ...]]:
        """Set up memory and kernels; return descriptors to send along too."""

    def meet(self, peers: Mapping[str, tuple[Peer, int | None]]) -> None:
        """Map the other devices' arenas, by space, each with its descriptor or None.

        A peer that cannot be reached is refused when a program names it.
        """

    def share(self, space: str, segment: Segment) -> None:
        """Map host memory in place of the space of this name."""

    def queue(self, run: Run) -> None:
        """Clear the device's own counters and queue all repeats; return before they have run."""

    def finish(self) -> None:
        """Wait until everything queued has run."""

    def ping(self, count: int) -> Pinged:
        """Compare the device's clock with CLOCK_MONOTONIC, while nothing else runs."""

    def close(self) -> None:
        """Give everything back."""


def main() -> None:
    """Serve the controller at the other end of the socket whose descriptor is argument 1."""
    # Ctrl-C reaches the whole process group; the controller decides what becomes of the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[ToWorker] = Connection(
        socket.socket(fileno=int(sys.argv[1])), receives=ToWorker, peer="the controller"
    )
    # ConnectionClosed: the controller is gone or has closed the pool.
    with contextlib.suppress(ConnectionClosed):
        _serve(connection)


def _serve(connection: Connection[ToWorker]) -> None:
    start, descriptors = connection.receive(None)
    if not isinstance(start, Start):
        raise MeasurementError("the first message is not Start")
    control_fd, lifeline = descriptors
    _die_with(lifeline)
    device: Device | None = None
    try:
        control = Control(Segment.attach(control_fd, start.control_bytes, "control"))
        device = _device(start.backend)
        started, fds = device.open(start, control)
        connection.send(started, fds)
        while _answer(connection, device):
            pass
    except ConnectionClosed:
        raise
    except Exception as error:
        connection.send(Failed.lost(error))
    finally:
        if device is not None:
            # The rest goes with the process.
            with contextlib.suppress(Exception):
                device.close()


def _die_with(lifeline: int) -> None:
    """End this process when the controller ends, even within a driver's call."""

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


def _answer(connection: Connection[ToWorker], device: Device) -> bool:
    message, descriptors = connection.receive(None)
    try:
        if isinstance(message, Run):
            device.queue(message)
            device.finish()
            connection.send(Done())
        elif isinstance(message, Ping):
            connection.send(device.ping(message.count))
        elif isinstance(message, Share):
            device.share(message.space, Segment.attach(descriptors[0], message.size, message.space))
            connection.send(Done())
        elif isinstance(message, Meet):
            fds = {-1: None, **dict(enumerate(descriptors))}
            device.meet({peer.space: (peer, fds[peer.descriptor]) for peer in message.peers})
            connection.send(Done())
        elif isinstance(message, LinkStep):
            connection.send(take_step(device.links, message))
    except MeasurementError as error:
        # The device itself is sound: it refused, or a link was lost.
        connection.send(Failed.of(error))
    return not isinstance(message, Stop)


if __name__ == "__main__":
    main()
