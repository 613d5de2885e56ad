"""Collectives of the installed NCCL whose values are compared: the part of a rank."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from tccl_py.errors import size_text
from tccl_py.model.links import LinkVerdict
from tccl_py.nccl_library import Library, check_cuda, cuda_driver

SIZES = (8 << 10, 1 << 20, 64 << 20)
"""Bytes of the messages: LL, LL128 or Simple, and what no cache hides."""
REPEATS = 10
"""Of the largest all-reduce, for its rate."""
HANG_S = 6.0
"""A collective of these sizes takes milliseconds; NCCL connects within a second or two."""
_POLL_S, _LOOK_S = 1e-4, 0.02
_Bytes = npt.NDArray[np.uint8]


class RankProof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank saw of a job whose values were compared."""

    verdict: LinkVerdict
    what: str = ""
    """The first collective that hung or was wrong, or NCCL's words."""
    seconds: float = 0.0
    """That the collectives took, with comparing."""
    repeats: tuple[float, ...] = ()
    """Seconds of each repeat of the largest all-reduce."""


def prove_values(library: Library, communicator: int, *, rank: int, ranks: int) -> RankProof:
    """Run collectives and compare what arrives; a hang ends it, wrong values do not.

    Ranks go on together after wrong values: a rank that stopped would hang the others.
    """
    begun = time.monotonic()
    job = _Job(library, communicator, rank, ranks)
    # A call can wait for ranks that hang in an earlier one: it has a thread of its own.
    context = ctypes.c_void_p()
    check_cuda("cuCtxGetCurrent", cuda_driver().cuCtxGetCurrent(ctypes.byref(context)))
    done = queue.SimpleQueue[RankProof]()

    def prove() -> None:
        cuda_driver().cuCtxSetCurrent(context)
        try:
            done.put(job.prove())
        except Exception as error:
            done.put(RankProof(verdict="fails", what=str(error) or type(error).__name__))

    threading.Thread(target=prove, daemon=True).start()
    while True:
        with contextlib.suppress(queue.Empty):
            return msgspec.structs.replace(
                done.get(timeout=_LOOK_S), seconds=time.monotonic() - begun
            )
        if time.monotonic() - job.since > HANG_S:
            what = f"{job.step} does not end"
            return RankProof(verdict="hangs", what=what, seconds=time.monotonic() - begun)


class _Job:
    """One rank's memory and calls: rank r sends base * (r + 1) + r, modulo 256."""

    def __init__(self, library: Library, communicator: int, rank: int, ranks: int) -> None:
        self._library, self._communicator = library, communicator
        self._rank, self._ranks = rank, ranks
        self._sent, self._kept = (library.allocate(SIZES[-1]) for _ in range(2))
        self._host = np.zeros(SIZES[-1], np.uint8)
        self.step, self.since = "the first collective", time.monotonic()

    def prove(self) -> RankProof:
        """Run and compare all collectives, then time the largest all-reduce."""
        wrong = ""
        for seed, (name, size, run) in enumerate(self._collectives()):
            self.step, self.since = f"{name} of {size_text(size)}", time.monotonic()
            expected = run(seed, size)
            self._wait()
            if count := self._differing(expected):
                wrong = wrong or f"{count} bytes of {self.step} are wrong"
        verdict: LinkVerdict = "wrong values" if wrong else "sound"
        return RankProof(verdict=verdict, what=wrong, repeats=self._time())

    def _collectives(self) -> Iterator[tuple[str, int, Callable[[int, int], tuple[int, _Bytes]]]]:
        """Yield name, bytes, and a call that starts it and returns where what is to arrive."""
        for size in SIZES:
            yield "all-reduce", size, self._all_reduce
            yield "send/recv", size, self._ring
            yield "all-to-all", size, self._all_to_all

    def _data(self, seed: int, size: int, rank: int) -> _Bytes:
        generator = np.random.Generator(np.random.SFC64(seed))
        base = np.frombuffer(generator.bytes(size), np.uint8)
        data: _Bytes = base * np.uint8(rank + 1) + np.uint8(rank)
        return data

    def _put(self, data: _Bytes) -> None:
        self._host[: data.size] = data
        _copy("cuMemcpyHtoD_v2", self._sent, self._host.ctypes.data, data.size)

    def _all_reduce(self, seed: int, size: int) -> tuple[int, _Bytes]:
        n = self._ranks
        base = self._data(seed, size, 0)
        self._put(base * np.uint8(self._rank + 1) + np.uint8(self._rank))
        self._library.collective("ncclAllReduce", self._sent, size, self._communicator)
        total = base * np.uint8(n * (n + 1) // 2 % 256) + np.uint8(n * (n - 1) // 2 % 256)
        return self._sent, total

    def _ring(self, seed: int, size: int) -> tuple[int, _Bytes]:
        after, before = (self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks
        self._put(self._data(seed, size, self._rank))
        self._library.exchange(
            [(self._sent, size, after)], [(self._kept, size, before)], self._communicator
        )
        return self._kept, self._data(seed, size, before)

    def _all_to_all(self, seed: int, size: int) -> tuple[int, _Bytes]:
        part = size // self._ranks
        self._put(self._data(seed, size, self._rank))
        sends = [(self._sent + peer * part, part, peer) for peer in range(self._ranks)]
        receives = [(self._kept + peer * part, part, peer) for peer in range(self._ranks)]
        self._library.exchange(sends, receives, self._communicator)
        base = self._data(seed, size, 0)[self._rank * part : (self._rank + 1) * part]
        parts = [base * np.uint8(peer + 1) + np.uint8(peer) for peer in range(self._ranks)]
        return self._kept, np.concatenate(parts)

    def _wait(self) -> None:
        while self._library.is_busy():
            time.sleep(_POLL_S)

    def _differing(self, expected: tuple[int, _Bytes]) -> int:
        """Return how many bytes arrived other than expected."""
        address, values = expected
        _copy("cuMemcpyDtoH_v2", self._host.ctypes.data, address, values.size)
        return int(np.count_nonzero(self._host[: values.size] != values))

    def _time(self) -> tuple[float, ...]:
        """Return the seconds of each repeat of the largest all-reduce."""
        seconds = []
        for _ in range(REPEATS + 1):
            self.since, begun = time.monotonic(), time.perf_counter()
            self._library.collective("ncclAllReduce", self._sent, SIZES[-1], self._communicator)
            self._wait()
            seconds.append(time.perf_counter() - begun)
        return tuple(seconds[1:])


def _copy(name: str, to: int, of: int, size: int) -> None:
    arguments = ctypes.c_void_p(to), ctypes.c_void_p(of), ctypes.c_size_t(size)
    check_cuda(name, getattr(cuda_driver(), name)(*arguments))
