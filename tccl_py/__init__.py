"""TCCL-style path finding: fast communication rings for GPU clusters, handed to NCCL.

The names below suffice for most programs; each is loaded at first use.

>>> import tccl_py
>>> model = tccl_py.load_machine("asus-esc8000a-e13p")
>>> source = tccl_py.open_source(model)
>>> (measured,) = source.measure("G0->G0->G4 G1->G1->G6")
>>> round(measured.total_gbps, 1), measured.simulated
(2.7, True)
>>> plan = tccl_py.make_plan(model.machine, model.knowledge, source, gpus=[0, 1, 2, 3])
>>> ring = plan.rings[0]
>>> ring.gpus, round(ring.rate_gbps, 1), ring.bottleneck.source
((0, 1, 2, 3), 42.9, 0)
>>> str(ring.hops[0].flow)
'G0->G0->G1{blocks=4}'
"""

from __future__ import annotations

import sys
from importlib import import_module

__version__ = "0.1.0"

# `typing` takes milliseconds to load, in which Ctrl-C would show a trace.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tccl_py.errors import InputError as InputError
    from tccl_py.errors import TcclError as TcclError
    from tccl_py.explanation.explain import explain as explain
    from tccl_py.model.cluster import Cluster as Cluster
    from tccl_py.model.measurement import BandwidthSource as BandwidthSource
    from tccl_py.model.measurement import Measurement as Measurement
    from tccl_py.model.reports import HostReport as HostReport
    from tccl_py.model.reports import cluster_of as cluster_of
    from tccl_py.model.transfer import Flow as Flow
    from tccl_py.model.transfer import TransferSet as TransferSet
    from tccl_py.model.transfer import parse_flow as parse_flow
    from tccl_py.model.transfer import parse_set as parse_set
    from tccl_py.nccl.settings import Settings as Settings
    from tccl_py.plan.directory import write_plan as write_plan
    from tccl_py.plan.plan import Plan as Plan
    from tccl_py.plan.text import diff as diff
    from tccl_py.planning.handle import PlanHandle as PlanHandle
    from tccl_py.planning.handle import load_plan as load_plan
    from tccl_py.planning.planner import make_cluster_plan as make_cluster_plan
    from tccl_py.planning.planner import make_plan as make_plan
    from tccl_py.planning.request import search_problem as search_problem
    from tccl_py.readers.live import discover_machine as discover_machine
    from tccl_py.readers.switches import read_switches as read_switches
    from tccl_py.report.drawing import drawing as drawing
    from tccl_py.search.problem import Budget as Budget
    from tccl_py.search.strategies import Run as Run
    from tccl_py.search.strategies import find_rings as find_rings
    from tccl_py.simulator.descriptions import bundled_names as bundled_names
    from tccl_py.simulator.descriptions import load_machine as load_machine
    from tccl_py.simulator.source import Simulator as Simulator
    from tccl_py.sources.opening import open_source as open_source

_NAMES = {
    "errors": "InputError TcclError",
    "explanation.explain": "explain",
    "model.cluster": "Cluster",
    "model.measurement": "BandwidthSource Measurement",
    "model.reports": "HostReport cluster_of",
    "model.transfer": "Flow TransferSet parse_flow parse_set",
    "nccl.settings": "Settings",
    "plan.plan": "Plan",
    "planning.handle": "PlanHandle load_plan",
    "planning.planner": "make_cluster_plan make_plan",
    "planning.request": "search_problem",
    "plan.text": "diff",
    "plan.directory": "write_plan",
    "readers.live": "discover_machine",
    "readers.switches": "read_switches",
    "report.drawing": "drawing",
    "search.problem": "Budget",
    "search.strategies": "Run find_rings",
    "simulator.descriptions": "bundled_names load_machine",
    "simulator.source": "Simulator",
    "sources.opening": "open_source",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (`_HOMES` names them)


def __getattr__(name: str) -> Any:
    """Load a public name from the name's module."""
    if "IPython" in sys.modules:
        import_module("tccl_py.report.drawing")
    if name not in _HOMES:
        raise AttributeError(f"module 'tccl_py' has no attribute {name!r}")
    return getattr(import_module(f"tccl_py.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
