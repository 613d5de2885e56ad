"""A session: the pool, the profiler and the watch that measure one machine, opened and closed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal

from tccl_profiler import linux as numa
from tccl_profiler.host.machine import cpus_of_devices
from tccl_profiler.pool import Memory, Pool
from tccl_profiler.profiler import Options, Profiler
from tccl_profiler.watch import Conditions, Watch, changes, complaints, conditions_note, warmed
from tccl_profiler.workers import DeviceSpec
from tccl_py.model.knowledge import Fingerprint
from tccl_py.model.machine import Machine
from tccl_py.model.transfer import parse_set
from tccl_py.sources.journal import JournalHeader

Backend = Literal["cuda", "host"]


class Session:
    """Measures a machine: `profiler` is its BandwidthSource while the session is open.

    Args:
        machine: this host, as discovered, or the host backend's stand-in.
        fingerprint: what tells it from others; a journal keeps it.
        backend: `cuda` or `host`.
        gpus: indices of the devices to measure; None is all.
        options: how carefully.
        memory: what each device gives.
    """

    def __init__(
        self,
        machine: Machine,
        fingerprint: Fingerprint,
        *,
        backend: Backend = "cuda",
        gpus: Sequence[int] | None = None,
        options: Options | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.machine = machine
        self.options = options or Options()
        self._fingerprint = fingerprint
        self._backend = backend
        chosen = machine.gpu_indices if gpus is None else tuple(gpus)
        self._gpus = tuple(sorted({machine.gpu(index).index for index in chosen}))
        cpus = _cpus(machine, backend)
        self.pool = Pool(
            backend,
            [
                DeviceSpec(device=f"G{i}", bus_id=machine.gpu(i).bus_id, cpus=cpus.get(i, ()))
                for i in self._gpus
            ],
            {
                f"C{node.index}": node.numa_id if node.numa_id >= 0 else None
                for node in machine.numa_nodes
            },
            memory=memory or (Memory() if backend == "cuda" else HOST_MEMORY),
        )
        self._watch: Watch | None = None
        self._before: Conditions = ()
        self.notices: list[str] = []

    def __enter__(self) -> Session:
        self.pool.start()
        try:
            self.profiler = Profiler(
                self.pool, options=self.options, source=f"{self._backend} backend"
            )
            # The profiler's notices and the session's are one list.
            self.profiler.notices = self.notices
            if self._backend == "cuda":
                self._begin_watch()
        except BaseException as error:
            self._end(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.look()
        finally:
            self._end(kind, error, trace)

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the watch and the pool, whatever has happened."""
        watch, self._watch = self._watch, None
        try:
            if watch is not None:
                watch.__exit__(kind, error, trace)
        finally:
            self.pool.close(hurry=kind is not None and not issubclass(kind, Exception))

    def _begin_watch(self) -> None:
        """See what the GPUs are like, at rest and, links awake, under load."""
        self._watch = Watch(self._gpus, self.pool.pids).__enter__()
        at_rest = self._watch.look()
        busy = parse_set(" ".join(f"G{i}->G{i}->C0 C0->G{i}->G{i}" for i in self._gpus))
        self._before, _ = warmed(self._watch.look, lambda: self.profiler.exercise(busy))
        for text in (*complaints(at_rest, loaded=False), *complaints(self._before, loaded=True)):
            self._note(text)

    def look(self) -> None:
        """Note what has changed on the GPUs since the session began."""
        if self._watch is not None:
            for text in changes(self._before, self._watch.look()):
                self._note(text)

    def _note(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    @property
    def conditions(self) -> str:
        """The GPUs' clocks and links under load, in one line; "" for the host backend."""
        return conditions_note(self._before) if self._before else ""

    @property
    def header(self) -> JournalHeader:
        """Whose a journal of this session's measurements is: the whole machine's, so that sets of
        some of its GPUs and sets of others can stand in one.
        """
        print_, limits = self._fingerprint, self.options.limits
        identity = (
            f"GPUs {', '.join(print_.gpu_uuids)}; driver {print_.driver}; kernel {print_.kernel}; "
            f"{print_.numa_count} NUMA node(s); {self._backend} backend, windows of "
            f"{limits.minimum_ms:g} to {limits.maximum_ms:g} ms, flows that meet "
            f"{'pass data on' if self.options.meeting == 'pass-on' else 'are independent'}"
        )
        return JournalHeader(machine=self.machine.name, identity=identity, simulated=False)


HOST_MEMORY = Memory(arena_bytes=128 << 20, user_bytes=64 << 20)
"""What the host backend's devices give: they have no memory of their own."""


def _cpus(machine: Machine, backend: Backend) -> Mapping[int, tuple[int, ...]]:
    """The CPUs that each device's worker is pinned to: its core, or its GPU's NUMA node."""
    if backend == "host":
        return cpus_of_devices(machine)
    found = {}
    for gpu in machine.gpus:
        node = machine.numa_nodes[machine.numa_of(f"G{gpu.index}")]
        if node.numa_id >= 0:
            found[gpu.index] = tuple(numa.cpus_of_node(node.numa_id))
    return found
