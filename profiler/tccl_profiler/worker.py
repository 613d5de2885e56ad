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

from tccl_profiler.channel import Channel, ChannelClosed
from tccl_profiler.control import Control
from tccl_profiler.device import Device
from tccl_profiler.links import (
    Accept,
    AskLinks,
    Connect,
    Linked,
    LinkLost,
    Listen,
    Listening,
)
from tccl_profiler.messages import (
    Done,
    Failed,
    Meet,
    Ping,
    Run,
    Share,
    Start,
    Stop,
    ToWorker,
)
from tccl_profiler.shared_memory import Segment
from tccl_py.errors import MeasurementError, TcclError
from tccl_py.limits import limit_reached


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
        from tccl_profiler.network.device import NicDevice  # noqa: PLC0415

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
