"""Where the tests of NCCL's behaviour find machines and NCCL's own verdicts."""

import functools
import json
from pathlib import Path

from tccl_py.topology.machine import Machine
from tccl_py.topology.readers.nccl_topology import read_nccl_topology

CASES = Path(__file__).parent / "cases"
VERDICTS = CASES / "nccl-verdicts"


@functools.cache
def machine(name: str) -> Machine:
    """A bundled topology, by file name."""
    folders = (VERDICTS / "topologies", CASES / "topologies", CASES / "h200x4-vm")
    return read_nccl_topology(next(folder / name for folder in folders if (folder / name).exists()))


def stock_choices():
    """What NCCL picked itself, by topology and environment."""
    return json.loads((VERDICTS / "stock-choices.json").read_text())


def graph_verdicts():
    """What NCCL did with graph files."""
    return json.loads((VERDICTS / "graph-files.json").read_text())


def graph_text(name: str) -> str:
    """A graph file as it stands, carriage returns included."""
    return (VERDICTS / "graphs" / name).read_bytes().decode()


def case_name(case) -> str:
    """A test id."""
    return "-".join(str(case[key]) for key in case if key in ("graph", "topology", "environment"))
