"""A session over the hosts of a job: facts, pools, and the profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tccl_profiler.clocks import HostClock
from tccl_profiler.cluster.agent import Agent
from tccl_profiler.cluster.agents import FIRST_PINGS, Agents, ClusterPool
from tccl_profiler.cluster.facts import HostFacts, check_hosts
from tccl_profiler.cluster.job import CONTROLLER, Job
from tccl_profiler.compiler import devices_used
from tccl_profiler.linux import shared_cores
from tccl_profiler.precision import WindowLimits
from tccl_profiler.profiler import Options, Profiler
from tccl_py.model.links import Proof
from tccl_py.model.measurement import NIC_TRANSPORTS, Backend, JournalHeader
from tccl_py.model.transfer import TransferSet, place_named

LIMITS = WindowLimits(
    minimum_ms=20.0,
    maximum_ms=400.0,
    longest_ms=1600.0,
    warm_minimum_ms=5.0,
    start_error_share=0.05,
)
"""Windows between hosts are long beside the bytes that sockets and switches hold back, and warm-ups
as long as TCP takes to find a rate. A slow network has slices of tens of milliseconds. Hosts that
start a millisecond apart need no window of a tenth of a second: bytes count after the warm-up."""


class ClusterSession:
    """Measures the hosts of a job; a context manager, on the controlling rank.

    Workers start with the first measured set. `devices` is the number of a host backend's devices,
    `expected` a host list, `only` the devices to start by host (a host that is left out has none).
    """

    def __init__(
        self,
        job: Job,
        *,
        backend: Backend = "cuda",
        devices: int | None = None,
        interfaces: Sequence[str] = (),
        expected: Sequence[str] = (),
        only: Mapping[str, frozenset[str]] | None = None,
        options: Options | None = None,
        gid_index: int | None = None,
    ) -> None:
        self._nccl_variables = {} if gid_index is None else {"NCCL_IB_GID_INDEX": str(gid_index)}
        self.options = options or Options(limits=LIMITS)
        self.network = self.options.network
        self.transport = NIC_TRANSPORTS[self.network]
        self._job = job
        self._backend = backend
        self._device_count, self._interfaces = devices, interfaces
        self._expected = tuple(expected)
        self.only = only
        self._profiler: Profiler | None = None
        self._checked: Sequence[TransferSet] = ()
        self.hosts: tuple[HostFacts, ...] = ()
        self.clocks: dict[str, HostClock] = {}
        self.notices: list[str] = []

    def __enter__(self) -> ClusterSession:
        job = self._job
        self._agents = Agents(job)
        described = self._agents.describe(
            self._backend, devices=self._device_count, interfaces=self._interfaces
        )
        self.hosts = tuple(
            msgspec.structs.replace(described[host], ranks=tuple(ranks))
            for host, ranks in job.hosts.items()
        )
        check_hosts(
            self.hosts,
            expected=self._expected,
            interfaces=self._interfaces,
            addressed=self.transport.need_addresses,
        )
        for host in self.hosts if self._backend == "host" else ():
            self.notices += [f"host {host.name}: {text}" for text in shared_cores(host.machine)]
        for name, ranks in job.hosts.items():
            is_controller = CONTROLLER in ranks
            clock = self.clocks[name] = HostClock(name, own=is_controller)
            if not is_controller:
                clock.add(self._agents.reading(name, FIRST_PINGS))
        return self

    def __exit__(self, *exception: object) -> None:
        self._profiler = None  # where the job ends, the agents end their workers

    @property
    def profiler(self) -> Profiler:
        """The profiler; the first use starts the workers."""
        if self._profiler is None:
            kinds = "G" if self.transport.joins_gpus else "GN"
            devices = {
                host.name: [name for name in host.devices if place_named(name).kind in kinds]
                for host in self.hosts
            }
            self.pool = ClusterPool(
                self._agents,
                self.clocks,
                devices if self.only is None else self.only,
                network=self.network,
                nccl_variables=self._nccl_variables,
                first=self._checked[:1],
            )
            self.pool.restart()
            self.notices += self.pool.warnings
            source = f"{self._backend} backend"
            self._profiler = Profiler(
                self.pool, options=self.options, source=source, notices=self.notices
            )
        return self._profiler

    def proofs(self, *, force: bool = False) -> dict[str, Proof]:
        """Return the proof of each host's links; see `Agents.proofs`."""
        return self._agents.proofs(force=force)

    def end_workers(self) -> None:
        """End the workers, so that the devices are free; the next measurement starts new ones."""
        if self._profiler is not None:
            self._profiler = None
            self._agents.ask(Agent.open, dict.fromkeys(self._agents.hosts, ((), {}, self.network)))

    @property
    def conditions(self) -> str:
        """The error bound of the hosts' clocks, in one line."""
        worst = max(self.clocks.values(), key=lambda clock: clock.error_ns)
        return f"clocks of {len(self.hosts)} hosts known to {worst.error_ns / 1e3:.0f} us"

    @property
    def header(self) -> JournalHeader:
        """Journal header: the hosts, drivers and options these measurements are valid for."""
        hosts = {
            host.name: f"GPUs {', '.join(host.fingerprint.gpu_uuids)}; "
            f"driver {host.fingerprint.driver}; kernel {host.fingerprint.kernel}; NICs "
            f"{', '.join(nic.name for nic in host.machine.nics)}"
            for host in sorted(self.hosts, key=lambda host: host.name)
        }
        options = f"{self._backend} backend, network by {self.network}, {self.options.identity}"
        return JournalHeader(
            machine=",".join(hosts),
            identity=options,
            simulated=False,
            dry_run=self._backend == "host",
            hosts=hosts,
        )

    def check_sets(self, sets: Sequence[TransferSet]) -> dict[str, frozenset[str]]:
        """Refuse unmeasurable sets before workers start; return the devices in use."""
        named = {host.name: (*host.machine.numa_nodes, *host.machine.nics) for host in self.hosts}
        others = [f"{host}.{device.id}" for host, devices in named.items() for device in devices]
        devices = [f"{host.name}.{name}" for host in self.hosts for name in host.devices]
        self._checked = sets
        return devices_used(sets, devices=devices, others=others, network=self.network)
