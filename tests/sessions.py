"""A stand-in for the profiler's session: a model answers, as if hardware had."""

import msgspec

from tccl_py.errors import MeasurementError
from tccl_py.model.machine import Fingerprint
from tccl_py.model.measurement import JournalHeader
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.sources import opening
from tccl_py.sources.profiled import MeasuredMachine

PRINT = Fingerprint(gpu_uuids=("GPU-a", "GPU-b"), driver="570.1", numa_count=1, kernel="6.1")


class Fake:
    """Stands for a session and its profiler: answers of a model that say they are measured."""

    def __init__(self, name, notice="G0 is warmer than before"):
        self.notice = notice
        self.model = load_bundled(name)
        self.simulator = Simulator(self.model)
        self.profiler = self
        self.notices = []
        self.conditions = "G0 and G1 at 1980 MHz"
        self.asked, self.entered, self.left = [], 0, 0
        self.more = {"skew_us": 3.25, "overlap": 0.995}
        self.before = lambda transfers: None
        self.alive = True

    def place(self):
        model = self.model
        return MeasuredMachine(
            backend="cuda", machine=model.machine, knowledge=model.knowledge, fingerprint=PRINT
        )

    @property
    def header(self):
        return JournalHeader(machine=self.model.name, identity="GPUs a, b", simulated=False)

    def __enter__(self):
        self.entered += 1
        self.notices = []
        return self

    def __exit__(self, *error):
        self.left += 1
        self.notices.append(self.notice)

    def measure(self, sets):
        (one,) = sets
        self.asked.append(str(one))
        self.before(one)
        if not self.alive:
            raise MeasurementError(f"{one}: the worker of G1 was killed")
        (found,) = self.simulator.measure(sets)
        rows = tuple((rate,) * 7 for rate in found.gbps)
        return [msgspec.structs.replace(found, samples_gbps=rows, simulated=False, **self.more)]

    def exercise(self, transfers):
        if not self.alive:
            raise MeasurementError("the worker of G1 was killed")


def measures_by(monkeypatch, session, *modules):
    """Let these modules measure by a stand-in."""
    for module in modules:
        monkeypatch.setattr(f"{module}.measured_machine", lambda *_: session.place())
    monkeypatch.setattr(opening, "open_session", lambda *_: session)
    return session
