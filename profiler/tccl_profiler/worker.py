"""The worker process: it opens one device, and serves the controller until told to stop.

It is started as `tccl_profiler.worker DESCRIPTOR`, a connected Unix socket to the controller. The
controller's end is in another module, because planning needs no device.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING

from tccl_profiler import messages
from tccl_profiler.shared_memory import Control, Segment
from tccl_py.errors import MeasurementError

if TYPE_CHECKING:
    from tccl_profiler.cuda_device import CudaDevice
    from tccl_profiler.host_device import HostDevice
    from tccl_profiler.nccl_links import Communicators
    from tccl_profiler.tcp import NicDevice, NicLinks

    Device = HostDevice | CudaDevice | NicDevice

_ORPHANED = 3  # exit code of a worker whose controller went away


def main() -> None:
    """Serve the controller at the other end of the socket whose descriptor is argument 1."""
    # Ctrl-C reaches the whole process group; the controller decides what becomes of the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: messages.Connection[messages.ToWorker] = messages.Connection(
        socket.socket(fileno=int(sys.argv[1])), receives=messages.ToWorker, peer="the controller"
    )
    # ConnectionClosed: the controller is gone or has closed the pool.
    with contextlib.suppress(messages.ConnectionClosed):
        _serve(connection)


def _serve(connection: messages.Connection[messages.ToWorker]) -> None:
    start, descriptors = connection.receive(None)
    if not isinstance(start, messages.Start):
        raise MeasurementError("the first message is not Start")
    _die_with(connection)
    device: Device | None = None
    try:
        control = Control(Segment.attach(descriptors[0], "control"))
        device = _device(start, control)
        started, fds = device.open()
        connection.send(started, fds)
        while _answer(connection, device):
            pass
    except messages.ConnectionClosed:
        raise
    except Exception as error:
        connection.send(messages.Failed.lost(error))
    finally:
        if device is not None:
            # The rest goes with the process.
            with contextlib.suppress(Exception):
                device.close()


def _die_with(connection: messages.Connection[messages.ToWorker]) -> None:
    """End this process when the controller's end closes, even within a driver's call."""
    poller = select.poll()
    poller.register(connection, 0)  # POLLHUP is reported whatever is asked for

    def watch() -> None:
        poller.poll()
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _device(start: messages.Start, control: Control) -> Device:
    if start.network:
        from tccl_py.model.measurement import NIC_TRANSPORTS  # noqa: PLC0415 (of NICs alone)

        module, _, name = NIC_TRANSPORTS[start.network].nic_device.partition(":")
        device: Device = getattr(import_module(module), name)(start, control)
        return device
    if start.backend == "cuda":
        from tccl_profiler.cuda_device import CudaDevice  # noqa: PLC0415 (one backend is loaded)

        return CudaDevice(start, control)
    from tccl_profiler.host_device import HostDevice  # noqa: PLC0415

    return HostDevice(start, control)


def _answer(connection: messages.Connection[messages.ToWorker], device: Device) -> bool:
    message, descriptors = connection.receive(None)
    try:
        if isinstance(message, messages.Run):
            device.run(message)
            connection.send(messages.Done())
        elif isinstance(message, messages.Ping):
            connection.send(device.ping(message.count))
        elif isinstance(message, messages.Share):
            # A GPU's arena has no descriptor.
            mapped = [Segment.attach(fd, message.space) for fd in descriptors]
            device.share(message, *mapped)
            connection.send(messages.Done())
        elif isinstance(message, messages.LinkStep):
            connection.send(_take_step(device.links, message))
    except MeasurementError as error:
        # The device itself is sound: it refused, or a link was lost.
        connection.send(messages.Failed.of(error))
    return not isinstance(message, messages.Stop)


def _take_step(links: NicLinks | Communicators, message: messages.LinkStep) -> messages.LinkEnds:
    ends = message.ends
    if message.step == "usable":
        return messages.LinkEnds(ends=dict.fromkeys(links.usable()))
    if message.step == "listen":
        return messages.LinkEnds(ends=dict(zip(ends, links.listen(list(ends)), strict=True)))
    if message.step == "connect":
        links.connect({link: end for link, end in ends.items() if end}, message.limit_s)
    else:
        links.accept(list(ends), message.limit_s)
    return messages.LinkEnds(ends=ends)


if __name__ == "__main__":
    main()
