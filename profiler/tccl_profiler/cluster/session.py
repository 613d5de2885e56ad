"""A session over the hosts of a job: who they are, their pools, and what measures by them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from tccl_profiler.cluster import messages as say
from tccl_profiler.cluster.agents import Agents, Patience
from tccl_profiler.cluster.facts import HostFacts, check_hosts
from tccl_profiler.cluster.job import CONTROLLER, Job
from tccl_profiler.cluster.pool import FIRST_PINGS, ClusterPool, HostClock, OwnClock
from tccl_profiler.compiler import program_for
from tccl_profiler.endpoints import Network, device_of, is_carried
from tccl_profiler.host.machine import shared_cores
from tccl_profiler.profiler import Options, Profiler
from tccl_profiler.program import is_nic, local
from tccl_profiler.shared_memory import MAX_LANES
from tccl_profiler.window import WindowLimits
from tccl_py.errors import InputError
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import Flow, Place, TransferSet
from tccl_py.sources.journal import JournalHeader

Backend = Literal["cuda", "host"]

LIMITS = WindowLimits(
    minimum_ms=20.0,
    maximum_ms=400.0,
    longest_ms=1600.0,
    warm_minimum_ms=5.0,
    start_error_share=0.05,
)
"""Between hosts, sockets and switches hold bytes back: a window must be long beside what they can
give out at once, and its warm-up as long as TCP takes to find a rate. A slow network has slices of
tens of milliseconds. Hosts that start a millisecond apart do not make windows of a tenth of a
second: what they did is counted after the warm-up, when all run."""


class ClusterSession:
    """Measures the hosts of a job; a context manager, on the rank that controls it.

    Entering finds out what the hosts are, and refuses those that cannot be one cluster. Workers
    start with the first set that is asked of `source`, or with `profiler`.

    Args:
        job: this rank's part in the job; the caller enters and leaves it.
        backend: `cuda` or `host`.
        devices: how many devices a host backend's stand-in has.
        interfaces: those to use as NICs on every host; none are each machine's own.
        expected: names of the hosts that there should be; none is all that are there.
        only: devices to start, by host and id; None is all. A host that is left out has none.
        options: how carefully; None is as usual, with LIMITS.
        patience: how long hosts are waited for.
        gid_index: NCCL_IB_GID_INDEX where NCCL carries what goes from host to host.
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
        patience: Patience | None = None,
        gid_index: int | None = None,
    ) -> None:
        self._nccl_variables = {} if gid_index is None else {"NCCL_IB_GID_INDEX": str(gid_index)}
        self.options = options or Options(limits=LIMITS)
        self._job = job
        self._backend = backend
        self._describe = say.Describe(
            backend=backend, devices=devices, interfaces=tuple(interfaces)
        )
        self._expected = tuple(expected)
        self.only = only
        self._patience = patience or Patience()
        self._profiler: Profiler | None = None
        self.hosts: tuple[HostFacts, ...] = ()
        self.clocks: dict[str, HostClock] = {}
        self.notices: list[str] = []
        self.source = ClusterSource(self)

    def __enter__(self) -> ClusterSession:
        job = self._job
        self._agents = Agents(
            {seat.host: job.messenger(seat.host) for seat in job.seats},
            patience=self._patience,
            lost=lambda _: setattr(job, "broken", True),
        )
        questions = dict.fromkeys(self._agents.hosts, self._describe)
        found = self._agents.ask(questions, say.Described)
        self.hosts = tuple(
            msgspec.structs.replace(found[seat.host].facts, ranks=seat.ranks) for seat in job.seats
        )
        check_hosts(
            self.hosts,
            expected=self._expected,
            interfaces=self._describe.interfaces,
            addressed=self.network == "tcp",
        )
        if self._backend == "host":
            for host in self.hosts:
                self.notices += [f"host {host.name}: {one}" for one in shared_cores(host.machine)]
        self._compare_clocks()
        return self

    def __exit__(self, *exception: object) -> None:
        # Where the job ends, the agents end their workers.
        self._profiler = None

    def _compare_clocks(self) -> None:
        for seat in self._job.seats:
            if CONTROLLER in seat.ranks:
                self.clocks[seat.host] = OwnClock(seat.host)
                continue
            clock = self.clocks[seat.host] = HostClock(seat.host)
            clock.add(self._agents.reading(seat.host, FIRST_PINGS))

    @property
    def profiler(self) -> Profiler:
        """What measures; the workers start when it is first asked for.

        Raises:
            MeasurementError: a device cannot be used; it names the host.
            SourceLostError: a host is gone.
        """
        if self._profiler is None:
            self.pool = ClusterPool(
                self._agents,
                self.clocks,
                {host.name: self._devices(host) for host in self.hosts},
                nccl_variables=self._nccl_variables,
            )
            self.pool.start()
            for text in self.pool.complaints:
                self.notices.append(text)
            self._profiler = Profiler(
                self.pool, options=self.options, source=f"{self._backend} backend"
            )
            # The profiler's notices and the session's are one list.
            self._profiler.notices = self.notices
        return self._profiler

    def end_workers(self) -> None:
        """End the workers, so that the hosts' devices are others' to use; what measures next starts
        new ones.

        Raises:
            SourceLostError: a host is gone.
        """
        if self._profiler is not None:
            self._profiler = None
            questions = dict.fromkeys(self._agents.hosts, say.Open(devices=()))
            self._agents.ask(questions, say.Opened)

    def _devices(self, host: HostFacts) -> Collection[str]:
        """Those that a host is to start."""
        if self.only is not None:
            return self.only.get(host.name, frozenset())
        # NICs are NCCL's own, where it carries bytes between GPUs.
        carried = self.network == "nccl"
        return [one for one in host.devices if not (carried and is_nic(one))]

    @property
    def network(self) -> Network:
        """What moves bytes from host to host."""
        return self.options.network

    @property
    def over_sockets(self) -> bool:
        """Whether NICs reach host memory only: TCP copies bytes there, whatever the GPUs could."""
        return self._backend == "cuda" and self.network == "tcp"

    @property
    def is_open(self) -> bool:
        """Whether workers were started."""
        return self._profiler is not None

    @property
    def conditions(self) -> str:
        """How well the hosts' clocks are known, in one line."""
        worst = max(self.clocks.values(), key=lambda clock: clock.error_ns)
        return f"clocks of {len(self.hosts)} hosts known to {worst.error_ns / 1e3:.0f} us"

    @property
    def header(self) -> JournalHeader:
        """Whose a journal of this session's measurements is: all these hosts', in any order."""
        limits = self.options.limits
        passing = "pass data on" if self.options.meeting == "pass-on" else "are independent"
        parts = [
            f"host {one.name}: GPUs {', '.join(one.fingerprint.gpu_uuids)}; "
            f"driver {one.fingerprint.driver}; kernel {one.fingerprint.kernel}; NICs "
            f"{', '.join(f'{nic.name}' for nic in one.machine.nics)}"
            for one in sorted(self.hosts, key=lambda one: one.name)
        ]
        parts.append(
            f"{self._backend} backend, network by {self.network}, windows of "
            f"{limits.minimum_ms:g} to {limits.maximum_ms:g} ms, flows that meet {passing}"
        )
        names = ",".join(sorted(one.name for one in self.hosts))
        return JournalHeader(machine=names, identity=" | ".join(parts), simulated=False)

    def check_sets(self, sets: Sequence[TransferSet]) -> dict[str, frozenset[str]]:
        """Refuse sets that cannot be measured here, before workers start; the devices they use.

        Raises:
            InputError: a place that names no host or is not there.
            MeasurementError: a set cannot be measured: too many blocks, an end that is not named.
        """
        used: dict[str, set[str]] = {}
        lanes = {f"{one.name}.{name}": MAX_LANES for one in self.hosts for name in one.devices}
        for one in sets:
            for flow in one.flows:
                self._check_flow(flow, used)
            program = program_for(one, lanes=lanes, network=self.network)
            for device in program.devices:
                host, _, name = device.rpartition(".")
                used.setdefault(host, set()).add(name)
        return {host: frozenset(names) for host, names in used.items()}

    def _check_flow(self, flow: Flow, used: dict[str, set[str]]) -> None:
        known = {one.name: one for one in self.hosts}
        carried = is_carried(flow, self.network)
        for transfer in flow.transfers:
            for place in (transfer.source, transfer.executor, transfer.destination):
                if place.host not in known:
                    what = f"host {place.host} is not in this job" if place.host else ""
                    raise InputError(
                        f"{place}", what or "names no host", f"there are {', '.join(known)}"
                    )
                host = known[place.host]
                if place.kind == "N" and carried:
                    _check_name(place, host, [f"N{nic.index}" for nic in host.machine.nics])
                    continue
                _check_place(place, host)
                # A device whose memory is used has a worker, though others may move the bytes.
                if place.kind in "GDN":
                    name = f"{'G' if place.kind == 'D' else place.kind}{place.index}"
                    used.setdefault(place.host, set()).add(name)


def _check_place(place: Place, host: HostFacts) -> None:
    if place.kind == "C":
        _check_name(place, host, [node.id for node in host.machine.numa_nodes])
    else:
        _check_name(place, host, list(host.devices))


def _check_name(place: Place, host: HostFacts, there: Sequence[str]) -> None:
    if local(device_of(place)) not in there:
        raise InputError(f"{place}", f"is not on host {host.name}", f"it has {', '.join(there)}")


class ClusterSource:
    """The BandwidthSource of a session."""

    simulated = False

    def __init__(self, session: ClusterSession) -> None:
        self._session = session

    def measure(self, sets: Sequence[TransferSet]) -> Sequence[Measurement]:
        """Measure each set; the answers are in the order given.

        Raises:
            InputError: a place that is not there.
            MeasurementError: a set cannot be measured.
            SourceLostError: a host is gone.
        """
        self._session.check_sets(sets)
        return self._session.profiler.measure(sets)
