"""Where the tests of NCCL's behaviour find machines and NCCL's own verdicts."""

import functools
import json
import re
from pathlib import Path

from hypothesis import strategies as st

from tccl_py.model.machine import Machine
from tccl_py.nccl.graph_file import parse_graph_file
from tccl_py.nccl.versions import ASSUMED, SWAPPING
from tccl_py.readers.nccl_topology import read_nccl_topology

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


_DAMAGE = (b"", b"9", b"-1", b" 0 0", b"\n", b"/", b"\0", b"\xff", b"\xd9\xa3", b"7" * 5000)


@st.composite
def torn(draw, log: bytes):
    """A log that was cut off, mixed up, and damaged where it has numbers and line ends, as text."""
    lines = log.splitlines(keepends=True)
    start, end = sorted(draw(st.integers(0, len(lines))) for _ in range(2))
    if draw(st.booleans()):
        lines[start:end] = draw(st.permutations(lines[start:end]))
    log = b"".join(lines)
    places = [match.span() for match in re.finditer(rb"[0-9]+\b|\n|$", log)]
    chosen = draw(st.lists(st.sampled_from(places), unique=True, max_size=6))
    for begin, over in sorted(chosen, reverse=True):
        keeps = draw(st.booleans())
        log = log[: over if keeps else begin] + draw(st.sampled_from(_DAMAGE)) + log[over:]
    return log[: draw(st.sampled_from([None, start * 60]))].decode(errors="replace")


def case_name(case) -> str:
    """A test id."""
    return "-".join(str(case[key]) for key in case if key in ("graph", "topology", "environment"))


def read_graph_file(path, version=ASSUMED):
    return parse_graph_file(path.read_text(), where=str(path), version=version)


def on_node(found, number):
    """Default NCCL's chains on one of several nodes; it swaps pairs on odd ones with crossnic 2."""
    chains = found.chains
    if found.cross_nic != SWAPPING or number % 2 == 0 or len(chains) % 2:
        return chains
    return tuple(chains[channel ^ 1] for channel in range(len(chains)))
