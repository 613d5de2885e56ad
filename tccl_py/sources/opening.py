"""`open_source`: rates of transfer sets by simulation, by measuring, or from a journal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tccl_py.errors import check_type, require
from tccl_py.model.measurement import JOURNAL_FILE
from tccl_py.simulator.descriptions import bundled_names, load_machine
from tccl_py.simulator.model import MachineModel
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import RecordedSource, read_journal
from tccl_py.sources.profiled import (
    MeasuredMachine,
    MeasurementOptions,
    ProfilerSource,
    measured_machine,
)

if TYPE_CHECKING:
    from tccl_profiler.session import Session


def open_source(
    machine: str | Path | MachineModel | MeasuredMachine | None = None,
    *,
    backend: str | None = None,
    devices: int | None = None,
    gpus: Sequence[int] | None = None,
    options: MeasurementOptions | None = None,
    noise: float = 0.0,
    seed: int = 0,
    journal: Path | str | None = None,
) -> Bench:
    """Open a BandwidthSource over a machine; nothing is started before the first set.

    >>> import tccl_py
    >>> with tccl_py.open_source("asus-esc8000a-e13p") as source:
    ...     (measured,) = source.measure([tccl_py.parse_set("G0->G0->G4")])
    >>> round(measured.rate_gbps, 1), measured.simulated, source.sets_measured
    (39.6, True, 1)

    A plan's directory, copied from any machine, answers by its journal; nothing is measured.
    Without a machine, or with `backend="host"`, the profiler measures this host. The hosts of an
    MPI job are measured by `tccl_py.sources.hosts.open_hosts`.

    Args:
        machine: a model to simulate (a bundled name, a file, or a MachineModel), a plan's
            directory, or what `measured_machine` gave; None is this host. A bundled name comes
            before a directory; `Path` names the directory.
        backend: of this host, not beside a machine: `cuda` (the default), or `host` for a dry run
            in host memory.
        devices: number of devices of the host backend.
        gpus: indices of the GPUs that sets will name; None is all, hidden from jobs or not.
        options: of measurements; not of simulations.
        noise, seed: relative standard deviation of simulated samples, 0 to 1, and its seed.
        journal: a file of measurements; sets in it are not measured again, new ones are added.

    Raises InputError: no such machine, no GPU, options out of range, or another machine's journal.
    """
    if machine is not None:
        check_type(machine, "machine", str, Path, MachineModel, MeasuredMachine)
    check_type(devices, "devices", int, type(None))
    check_type(gpus, "gpus", Sequence, type(None))
    check_type(options, "options", MeasurementOptions, type(None))
    check_type(journal, "journal", str, Path, type(None))
    is_own_host = machine is None or (backend is None and devices is None)
    require(
        is_own_host, "`backend`, `devices`", "are of this host", "leave them out beside a machine"
    )
    simulated = isinstance(machine, (str, Path, MachineModel))
    require(not simulated or options is None, "`options`", "are of hardware", "leave them out")
    require(simulated or noise == seed == 0, "`noise`, `seed`", "are of models", "leave them out")
    # A folder here may have the name of a bundled model.
    is_named = isinstance(machine, str) and machine in bundled_names()
    if isinstance(machine, (str, Path)) and not is_named and os.path.isdir(machine):  # noqa: PTH112
        given = {"gpus": gpus, "noise, seed": noise or seed, "journal": journal}
        for name, value in given.items():
            require(not value, name, "is beside a plan's directory", "leave it out")
        path = Path(machine) / JOURNAL_FILE
        contents = read_journal(path)
        return Bench(RecordedSource(path, contents.header), contents.measurements)
    if isinstance(machine, (str, Path, MachineModel)):
        model = machine if isinstance(machine, MachineModel) else load_machine(machine)
        for index in gpus or ():
            model.machine.gpu(index)
        bench = Bench(Simulator(model, noise=noise, seed=seed))
    else:
        place = machine or measured_machine(backend, devices)
        options = options or MeasurementOptions()
        measuring = ProfilerSource(
            open_session(place, gpus, options),
            options,
            limits=place.notices,
            dry_run=place.backend == "host",
            fingerprint=place.fingerprint,
        )
        bench = Bench(measuring)
    if journal is not None:
        bench.keep_in(journal)
    return bench


def open_session(
    place: MeasuredMachine, gpus: Sequence[int] | None, options: MeasurementOptions
) -> Session:
    """Return the session that measures a machine; entering it starts the workers.

    Raises InputError: cupy is missing.
    """
    from tccl_profiler.session import Session  # noqa: PLC0415

    if place.backend == "cuda":
        from tccl_py.readers.live import check_cupy  # noqa: PLC0415 (loads NVML)

        check_cupy()
    return Session(
        place.machine,
        place.fingerprint,
        backend=place.backend,
        gpus=gpus,
        options=options.for_profiler,
    )
