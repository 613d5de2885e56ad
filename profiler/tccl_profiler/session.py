"""A session: the pool, the profiler and the watch that measure one machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tccl_profiler.linux import cpus_of_devices
from tccl_profiler.messages import DeviceSpec
from tccl_profiler.pool import Memory, Pool
from tccl_profiler.profiler import Options, Profiler
from tccl_profiler.watch import Conditions, changes, conditions_note, warm_links, warnings, watching
from tccl_py.errors import MeasurementError
from tccl_py.model.machine import Fingerprint, Machine
from tccl_py.model.measurement import Backend, JournalHeader
from tccl_py.model.transfer import Place, index_of, parse_set

HOST_MEMORY = Memory(arena_bytes=128 << 20, user_bytes=64 << 20)
"""The memory of the host backend's devices, which have none of their own."""


class Session:
    """Measures a machine, this host or the stand-in, over `gpus` (None: all) while it is open."""

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
        self.pool = pool_of(machine, backend, [f"G{index}" for index in self._gpus], memory=memory)
        self._look: Callable[[], Conditions] | None = None
        self._before: Conditions = ()
        self.notices: list[str] = []

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            stack.push(self._close_pool)
            self.pool.start()
            source = f"{self._backend} backend"
            self.profiler = Profiler(
                self.pool, options=self.options, source=source, notices=self.notices
            )
            if self._backend == "cuda":
                # Wake the GPUs up, and warn of what would disturb measurements.
                look = self._look = stack.enter_context(watching(self._gpus, self.pool.pids))
                notes = warnings(look(), loaded=False)
                self._before = warm_links(look, self._load)
                self.profiler.note(*notes, *warnings(self._before, loaded=True))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            if exception[1] is None:
                self.look()
        finally:
            self._look = None
            self._open.__exit__(*exception)

    def _close_pool(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.pool.close(hurry=error is not None and not isinstance(error, Exception))

    def look(self) -> None:
        """Note changes of the GPUs since the session began."""
        if self._look is None:
            return
        found = changes(self._before, self._look())
        if found:
            # GPUs that were idle meanwhile lower their clocks and links.
            with contextlib.suppress(MeasurementError):
                found = changes(self._before, warm_links(self._look, self._load))
        self.profiler.note(*found)

    def _load(self) -> None:
        # Few blocks: a program that shares its GPUs by MPS cannot run all of its own at once.
        ways = "G{0}->G{0}->C0{{blocks=8}} C0->G{0}->G{0}{{blocks=8}}"
        self.profiler.exercise(parse_set(" ".join(map(ways.format, self._gpus))))

    @property
    def conditions(self) -> str:
        """The GPUs' clocks and links under load, in one line; "" for the host backend."""
        return conditions_note(self._before) if self._before else ""

    @property
    def header(self) -> JournalHeader:
        """Journal header: the whole machine, driver and options of these measurements."""
        print_ = self._fingerprint
        identity = (
            f"GPUs {', '.join(print_.gpu_uuids)}; driver {print_.driver}; kernel {print_.kernel}; "
            f"{print_.numa_count} NUMA node(s); {self._backend} backend, "
            f"{self.options.identity}"
        )
        return JournalHeader(
            machine=self.machine.name,
            identity=identity,
            simulated=False,
            dry_run=self._backend == "host",
        )


def pool_of(
    machine: Machine,
    backend: str,
    devices: Sequence[str],
    *,
    memory: Memory | None = None,
    nics: Mapping[str, DeviceSpec] | None = None,
    variables: Mapping[str, str] | None = None,
    host: str = "",
) -> Pool:
    """Return a pool for some GPUs of a machine, or cores in their place, and NICs, by name.

    Names of a cluster's devices have their `host` in front.
    """
    cores = cpus_of_devices(machine) if backend == "host" else {}

    def spec(name: str) -> DeviceSpec:
        gpu = machine.gpu(index_of(name))
        return DeviceSpec(device=name, bus_id=gpu.bus_id, cpus=cores.get(gpu.index, ()))

    nic_specs = nics or {}
    specs = [nic_specs[name] if name in nic_specs else spec(name) for name in devices]
    numa_ids = {
        str(Place("C", node.index, host)): node.numa_id if node.numa_id >= 0 else None
        for node in machine.numa_nodes
    }
    usual = HOST_MEMORY if backend == "host" else None
    return Pool(backend, specs, numa_ids, memory=memory or usual, variables=variables)
