"""A session over the hosts of a job: facts, pools, and the profiler."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.agents import Agents, HostTimeouts
from tccl_profiler.cluster.facts import HostFacts, check_hosts
from tccl_profiler.cluster.job import CONTROLLER, Job
from tccl_profiler.cluster.pool import FIRST_PINGS, ClusterPool, HostClock, OwnClock
from tccl_profiler.compiler import check_places
from tccl_profiler.endpoints import Network, device_of, is_carried
from tccl_profiler.host_device import shared_cores
from tccl_profiler.precision import WindowLimits
from tccl_profiler.profiler import Options, Profiler
from tccl_profiler.program import is_nic, local
from tccl_profiler.session import Backend
from tccl_profiler.shared_memory import MAX_LANES
from tccl_py.errors import InputError
from tccl_py.model.transfer import Flow, Place, TransferSet
from tccl_py.sources.remembering import PART, JournalHeader

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
        timeouts: HostTimeouts | None = None,
        gid_index: int | None = None,
    ) -> None:
        self._nccl_variables = {} if gid_index is None else {"NCCL_IB_GID_INDEX": str(gid_index)}
        self.options = options or Options(limits=LIMITS)
        self.network: Network = self.options.network
        self._job = job
        self._backend = backend
        self._describe = say.Describe(
            backend=backend, devices=devices, interfaces=tuple(interfaces)
        )
        self._expected = tuple(expected)
        self.only = only
        self._timeouts = timeouts
        self._profiler: Profiler | None = None
        self.hosts: tuple[HostFacts, ...] = ()
        self.clocks: dict[str, HostClock] = {}
        self.notices: list[str] = []

    def __enter__(self) -> ClusterSession:
        job = self._job
        self._agents = Agents.of(job, self._timeouts)
        questions = dict.fromkeys(self._agents.hosts, self._describe)
        found = self._agents.ask(questions, HostFacts)
        self.hosts = tuple(
            msgspec.structs.replace(found[seat.host], ranks=seat.ranks) for seat in job.seats
        )
        check_hosts(
            self.hosts,
            expected=self._expected,
            interfaces=self._describe.interfaces,
            addressed=self.network == "tcp",
        )
        if self._backend == "host":
            for host in self.hosts:
                self.notices += [f"host {host.name}: {text}" for text in shared_cores(host.machine)]
        for seat in job.seats:
            own = CONTROLLER in seat.ranks
            clock = self.clocks[seat.host] = (OwnClock if own else HostClock)(seat.host)
            if not own:
                clock.add(self._agents.reading(seat.host, FIRST_PINGS))
        return self

    def __exit__(self, *exception: object) -> None:
        # Where the job ends, the agents end their workers.
        self._profiler = None

    @property
    def profiler(self) -> Profiler:
        """The profiler; the first use starts the workers."""
        if self._profiler is None:
            self.pool = ClusterPool(
                self._agents,
                self.clocks,
                {host.name: self._devices(host) for host in self.hosts},
                nccl_variables=self._nccl_variables,
            )
            self.pool.start()
            self.notices += self.pool.warnings
            source = f"{self._backend} backend"
            self._profiler = Profiler(self.pool, options=self.options, source=source)
            # The profiler's notices and the session's are one list.
            self._profiler.notices = self.notices
        return self._profiler

    def end_workers(self) -> None:
        """End the workers, so that the devices are free; the next measurement starts new ones."""
        if self._profiler is not None:
            self._profiler = None
            self._agents.ask(dict.fromkeys(self._agents.hosts, say.Open()), say.Opened)

    def _devices(self, host: HostFacts) -> Collection[str]:
        if self.only is not None:
            return self.only.get(host.name, frozenset())
        carried = self.network == "nccl"
        return [name for name in host.devices if not (carried and is_nic(name))]

    @property
    def over_sockets(self) -> bool:
        """Whether NICs of GPU hosts reach host memory only, because TCP copies bytes there."""
        return self._backend == "cuda" and self.network == "tcp"

    @property
    def conditions(self) -> str:
        """The error bound of the hosts' clocks, in one line."""
        worst = max(self.clocks.values(), key=lambda clock: clock.error_ns)
        return f"clocks of {len(self.hosts)} hosts known to {worst.error_ns / 1e3:.0f} us"

    @property
    def header(self) -> JournalHeader:
        """Journal header: the hosts, drivers and options these measurements are valid for."""
        hosts = sorted(self.hosts, key=lambda host: host.name)
        parts = [
            f"host {host.name}: GPUs {', '.join(host.fingerprint.gpu_uuids)}; "
            f"driver {host.fingerprint.driver}; kernel {host.fingerprint.kernel}; NICs "
            f"{', '.join(nic.name for nic in host.machine.nics)}"
            for host in hosts
        ]
        parts.append(f"{self._backend} backend, network by {self.network}, {self.options.identity}")
        names = ",".join(host.name for host in hosts)
        return JournalHeader(machine=names, identity=PART.join(parts), simulated=False)

    def check_sets(self, sets: Sequence[TransferSet]) -> dict[str, frozenset[str]]:
        """Refuse unmeasurable sets before workers start; return the devices in use."""
        used: dict[str, set[str]] = {}
        lanes = {f"{host.name}.{name}": MAX_LANES for host in self.hosts for name in host.devices}
        for transfers in sets:
            for flow in transfers.flows:
                self._check_flow(flow, used)
            check_places(transfers, lanes=lanes, network=self.network)
        return {host: frozenset(names) for host, names in used.items()}

    def _check_flow(self, flow: Flow, used: dict[str, set[str]]) -> None:
        known = {host.name: host for host in self.hosts}
        carried = is_carried(flow, self.network)
        for transfer in flow.transfers:
            for place in (transfer.source, transfer.executor, transfer.destination):
                if place.host not in known:
                    what = f"host {place.host} is not in this job" if place.host else ""
                    there = f"there are {', '.join(known)}"
                    raise InputError(f"{place}", what or "names no host", there)
                host, name = known[place.host], local(device_of(place))
                if place.kind == "C":
                    _check_name(place, host, [node.id for node in host.machine.numa_nodes])
                elif place.kind == "N" and carried:
                    _check_name(place, host, [f"N{nic.index}" for nic in host.machine.nics])
                else:
                    _check_name(place, host, host.devices)
                    # A device whose memory is used has a worker, though others may move the bytes.
                    used.setdefault(place.host, set()).add(name)


def _check_name(place: Place, host: HostFacts, there: Sequence[str]) -> None:
    if local(device_of(place)) not in there:
        raise InputError(f"{place}", f"is not on host {host.name}", f"it has {', '.join(there)}")
