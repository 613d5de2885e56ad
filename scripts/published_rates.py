"""Table of docs/design/simulator.md: what owners of machines published beside what the models say.

usage: scripts/compare-with-published
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from tccl_py import Plan, Simulator, bundled_names, load_machine, make_plan
from tccl_py.plan.chains import ChoiceName

PUBLISHED = Path("tests/cases/published/all-reduce.json")
TOPOLOGIES = Path("tests/cases/topologies")
PAGE = Path("docs/design/simulator.md")
BEGIN = "<!-- table by scripts/compare-with-published -->"


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bus bandwidth of an all-reduce that somebody published.

    `choice` is the choice of our plan that comes closest; `note` says how they differ.
    """

    machine: str
    gpus: str
    choice: ChoiceName
    size: str
    gbps: float
    source: str
    note: str = ""


def published() -> list[Published]:
    """Read the published rates."""
    return msgspec.json.decode(PUBLISHED.read_bytes(), type=list[Published])


@cache
def planned(machine: str, gpus: str) -> Plan:
    """Return the plan of some of a machine's GPUs, by its model."""
    bundled = machine in bundled_names()
    model = load_machine(machine if bundled else TOPOLOGIES / f"{machine}.xml")
    return make_plan(model.machine, model.knowledge, Simulator(model), gpus=gpus, subsets=False)


def modelled_gbps(row: Published) -> float:
    """Return what the model says of the row's choice, in GB/s."""
    return planned(row.machine, row.gpus).choices[row.choice].rate_gbps


def table() -> str:
    """Return the page's table."""
    lines = [
        "| machine, GPUs | choice | size | published, GB/s | simulated, GB/s | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in published():
        modelled = modelled_gbps(row)
        note = f" ({row.note})" if row.note else ""
        lines.append(
            f"| {row.machine}, {row.gpus} | {row.choice}{note} | {row.size} | {row.gbps:.1f} "
            f"| {modelled:.1f} | {modelled / row.gbps:.2f} |"
        )
    sources = sorted({row.source for row in published()})
    return "\n".join([*lines, "", f"Sources: {'; '.join(sources)}.", ""])


def main() -> None:
    """Rewrite the table below the mark in the page."""
    head, mark, _ = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{mark}\n\n{table()}")


if __name__ == "__main__":
    main()
