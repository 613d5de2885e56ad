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

from tccl_profiler.messages import (
    DeviceRequests,
    Endpoint,
    LinkStep,
    Pinged,
    Run,
    Share,
    Start,
    Started,
)
from tccl_profiler.program import Link
from tccl_profiler.protocol import Connection, ConnectionClosed, Server
from tccl_profiler.shared_memory import Control, Segment

if TYPE_CHECKING:
    from tccl_profiler.cuda_device import CudaDevice
    from tccl_profiler.host_device import HostDevice
    from tccl_profiler.tcp import NicDevice

    Device = HostDevice | CudaDevice | NicDevice

_ORPHANED = 3  # exit code of a worker whose controller went away


def main() -> None:
    """Serve the controller at the other end of the socket whose descriptor is argument 1."""
    # Ctrl-C reaches the whole process group; the controller decides what becomes of the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=int(sys.argv[1])), peer="the controller")
    # ConnectionClosed: the controller is gone or has closed the pool.
    with contextlib.suppress(ConnectionClosed):
        Worker(connection).serve()


class Worker(Server):
    """Serves the requests of a controller by one device."""

    called = (
        DeviceRequests.open,
        DeviceRequests.share,
        DeviceRequests.run,
        DeviceRequests.ping,
        DeviceRequests.take,
    )
    _device: Device

    def serve(self) -> None:
        """Answer requests until told to stop, and close the device."""
        try:
            self.serve_requests()
        finally:
            # The rest goes with the process; without a device there is none to close.
            with contextlib.suppress(Exception):
                self._device.close()

    def open(self, start: Start) -> Started:
        """Take the device."""
        _die_with(self._connection)
        (control,) = self._connection.take_fds()
        self._device = _device(start, Control(Segment.attach(control, "control")))
        started, self._fds = self._device.open()
        return started

    def share(self, share: Share) -> None:
        """Take the memory of a space; a GPU's arena has no descriptor."""
        fds = self._connection.take_fds()
        self._device.share(share, *(Segment.attach(fd, share.space) for fd in fds))

    def run(self, run: Run) -> None:
        """Run all repeats of a program."""
        self._device.run(run)

    def ping(self, count: int) -> Pinged:
        """Read the clock of the device `count` times."""
        return self._device.ping(count)

    def take(self, step: LinkStep) -> dict[Link, Endpoint | None]:
        """Take one step for links."""
        links, ends = self._device.links, step.ends
        if step.step == "usable":
            return dict.fromkeys(links.usable())
        if step.step == "listen":
            return dict(zip(ends, links.listen(list(ends)), strict=True))
        if step.step == "connect":
            links.connect({link: end for link, end in ends.items() if end}, step.limit_s)
        else:
            links.accept(list(ends), step.limit_s)
        return dict(ends)


def _die_with(connection: Connection) -> None:
    """End this process when the controller's end closes, even within a driver's call."""
    poller = select.poll()
    poller.register(connection, 0)  # POLLHUP is reported whatever is asked for

    def watch() -> None:
        poller.poll()
        os._exit(_ORPHANED)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _device(start: Start, control: Control) -> Device:
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


if __name__ == "__main__":
    main()
