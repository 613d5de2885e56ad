"""Table of docs/design/simulator.md: what owners of machines published beside what the models say.

usage: scripts/compare-with-published
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path

from scripts.simulator_fit import (
    Fit,
    Observation,
    Published,
    PublishedRates,
    mean_bandwidth,
    observed_all_reduce,
    published_rates,
    read_observations,
    read_published,
    relative_errors,
)
from tccl_py.errors import size_text
from tccl_py.nccl.settings import environment_text
from tccl_py.simulator.model import Parameters, bundled_parameters

MEASURED = Path("tests/cases/measured")
REPOSITORY = "local-inference-lab/rtx6kpro"
PAGE = Path("docs/design/simulator.md")
BEGIN = "<!-- tables by scripts/compare-with-published -->"


CHOSEN = ("pcie_kernel_block", "pcie_kernel_share")
"""Parameters that these figures decide; all others follow from measured sets."""


def sections() -> str:
    """Return the page's generated part: the parameters, the fitted rows and the machines apart."""
    content, measured = published_rates(), read_observations(MEASURED)
    machines = tuple(dict.fromkeys(row.machine for row in content.rates))
    fit = Fit((*measured, *read_published()))
    without = {
        machine: Fit((*measured, *read_published(without=machine))).parameters()
        for machine in machines
    }
    sources = {*map(attrgetter("source"), (*content.rates, *content.apart, *content.latencies))}
    tables = (_parameters(content, without), _fitted(content, fit, without), _apart(content))
    lines = [line for table in tables for line in (*table, "")]
    return "\n".join(
        [*lines, f"Sources: {'; '.join(sorted(sources))}. Pages are those of {REPOSITORY}.", ""]
    )


def _parameters(content: PublishedRates, without: Mapping[str, Parameters]) -> Iterator[str]:
    """Yield the table of the parameters that these figures decide."""
    yield f"| parameter | value | {' | '.join(f'without {machine}' for machine in without)} | is |"
    yield f"|---|---|{'---|' * len(without)}---|"
    left_out = [_values(parameters) for parameters in without.values()]
    for part in bundled_parameters().parameters:
        if part.name in CHOSEN:
            cells = (f"{value:g}" for value in (part.value, *(v[part.name] for v in left_out)))
            yield f"| {part.name} | {' | '.join(cells)} | {part.note.partition(';')[0]} |"
    steps = (content.step_us(without=machine) for machine in ("", *without))
    cells = " | ".join(f"{step:.2f}" for step in steps)
    yield f"| a step of a ring, us | {cells} | the mean of {len(content.latencies)} boxes |"


def _values(parameters: Parameters) -> dict[str, float]:
    return {part.name: part.value for part in parameters.parameters}


def _fitted(content: PublishedRates, fit: Fit, without: Mapping[str, Parameters]) -> Iterator[str]:
    """Yield the table of machines with a model, each also by the fit that leaves it out."""
    yield "| machine, GPUs | choice | size | published | model | error | left out |"
    yield "|---|---|---|---|---|---|---|"
    for row in content.rates:
        here = observed_all_reduce(row, content.step_us())
        there = observed_all_reduce(row, content.step_us(without=row.machine))
        error = _error(fit, here, bundled_parameters())
        note = f" ({row.note})" if row.note else ""
        yield (
            f"| {row.machine}, {row.gpus[0]}-{row.gpus[-1]} | {_choice(row)}{note} "
            f"| {_sizes(row.bytes)} | {row.gbps:.1f} | {row.gbps * (1 + error):.1f} "
            f"| {error:+.0%} | {_error(fit, there, without[row.machine]):+.0%} |"
        )


def _apart(content: PublishedRates) -> Iterator[str]:
    """Yield the table of machines that no model describes: a GPU's port bounds their rings."""
    values = _values(bundled_parameters())
    port = values["pcie5_x16_both_ways"] * values["pcie_kernel_share"] / 2
    yield "| machine | size | published | a port's rate | error |"
    yield "|---|---|---|---|---|"
    for row in content.apart:
        rate = mean_bandwidth(port, row.gpus, row.bytes, content.step_us())
        yield (
            f"| {row.machine} | {_sizes(row.bytes)} | {row.gbps:.1f} | {rate:.1f} "
            f"| {rate / row.gbps - 1:+.0%} |"
        )


def _error(fit: Fit, row: Observation, parameters: Parameters) -> float:
    (error,) = relative_errors(row, fit.predict(row, parameters))
    return error


def _choice(row: Published) -> str:
    graph = f"a graph file of {len(row.rings)} rings, {2 * row.settings.channels} channels"
    variables = environment_text(row.settings)
    return " and ".join(filter(None, [variables, graph if row.rings else ""])) or "default"


def _sizes(sizes: tuple[int, ...]) -> str:
    low, high = size_text(min(sizes)), size_text(max(sizes))
    return low if low == high else f"{low} to {high}, mean"


def main() -> None:
    """Rewrite what follows the mark in the page."""
    head, mark, _ = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{mark}\n\n{sections()}")


if __name__ == "__main__":
    main()
