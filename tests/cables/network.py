"""The net plugin of cables (`net.c`): its build, its environment, and its functions from Python."""

import ctypes
import os
import subprocess
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("net.c")
NAMES = ("rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1")
"""The functions of a small host of two ports: 0 and 2 are of port 0, 1 and 3 of port 1."""
PORTS = ((0, 2), (1, 3))

FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
FUNCTIONS = (
    *("init", "devices", "properties", "listen", "connect", "accept", "reg", "reg_dmabuf"),
    *("dereg", "send", "receive", "flush", "test", "close_send", "close_receive", "close_listener"),
)


def build(folder: Path) -> Path:
    """Compile the plugin; NCCL_NET_PLUGIN takes its path."""
    library = folder / "libnccl-net-cables.so"
    subprocess.run(["gcc", *FLAGS, "-o", library, SOURCE], check=True)
    return library


def ring_cables(hosts, leave=0):
    """Cables of a ring: port `leave` of each host to the other port of the next."""
    far = 1 - leave
    pairs = ((host, (host + 1) % hosts) for host in range(hosts))
    return [
        (host, out, other, into)
        for host, other in pairs
        for out, into in zip(PORTS[leave], PORTS[far], strict=True)
    ]


def write_cables(path: Path, cables) -> Path:
    path.write_text("".join(f"{a} {x} {b} {y}\n" for a, x, b, y in cables))
    return path


class Table(ctypes.Structure):
    """The plugin's table of functions."""

    _fields_ = (("name", ctypes.c_char_p), *((name, ctypes.c_void_p) for name in FUNCTIONS))


class Net:
    """The plugin in this process, as host `host`."""

    def __init__(self, library, host, cables, log, *, aware):
        os.environ |= {
            "CABLES_FILE": str(cables),
            "CABLES_HOST": str(host),
            "CABLES_NAMES": ",".join(NAMES),
            "CABLES_LOG": str(log),
            "NCCL_IB_SUBNET_AWARE_ROUTING": str(int(aware)),
        }
        self._table = Table.in_dll(ctypes.CDLL(str(library)), "ncclNetPlugin_v10")
        self("init", None, None)

    def __call__(self, name, *arguments):
        """Call a function; RuntimeError if it fails."""
        code = ctypes.cast(getattr(self._table, name), _prototype(len(arguments)))(
            *(getattr(argument, "value", argument) or 0 for argument in arguments)
        )
        if code:
            raise RuntimeError(f"{name}: {code}")

    def listen(self, device):
        handle, listener = ctypes.create_string_buffer(128), ctypes.c_void_p()
        self("listen", device, ctypes.addressof(handle), ctypes.addressof(listener))
        return handle.raw, listener

    def connect(self, device, handle):
        """Connect to a listener's handle, asking until it is there."""
        held, link = ctypes.create_string_buffer(handle, 128), ctypes.c_void_p()
        while not link.value:
            self("connect", device, None, ctypes.addressof(held), ctypes.addressof(link), None)
        return link

    def accept(self, listener):
        link = ctypes.c_void_p()
        while not link.value:
            self("accept", listener.value, ctypes.addressof(link), None)
        return link

    def send(self, link, buffers):
        """Send buffers in order, all at the same time under way."""
        self._finish([self._start("send", link, buffer) for buffer in buffers])

    def receive(self, link, sizes):
        """Receive buffers of at most these sizes; return what came."""
        buffers = [ctypes.create_string_buffer(size) for size in sizes]
        came = self._finish([self._start("receive", link, buffer) for buffer in buffers])
        return [buffer.raw[:size] for buffer, size in zip(buffers, came, strict=True)]

    def _start(self, name, link, buffer):
        request, at = ctypes.c_void_p(), ctypes.addressof(buffer)
        size = ctypes.c_size_t(len(buffer))
        while not request.value:
            if name == "send":
                self("send", link.value, at, size, 0, None, None, ctypes.addressof(request))
            else:
                data = ctypes.c_void_p(at)
                lists = (ctypes.addressof(data), ctypes.addressof(size), None, None, None)
                self("receive", link.value, 1, *lists, ctypes.addressof(request))
        return request

    def _finish(self, requests):
        sizes = []
        for request in requests:
            done, size = ctypes.c_int(), ctypes.c_int()
            while not done.value:
                addresses = (ctypes.addressof(done), ctypes.addressof(size))
                self("test", request.value, *addresses)
            sizes.append(size.value)
        return sizes


@cache
def _prototype(count):
    return ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_size_t for _ in range(count)))
