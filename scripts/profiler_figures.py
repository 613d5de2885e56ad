"""The profiler's accuracy and speed, from the raw journals of `scripts/judge-profiler`.

usage: scripts/profiler-figures [DIR]     (default: the recorded run in tests/cases/profiler)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy import stats

from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import parse_set
from tccl_py.sources.journal import read_journal

RECORDED = Path(__file__).resolve().parents[1] / "tests" / "cases" / "profiler" / "h200x2-vm"
MIB = 1 << 20


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A ring's measured rate and NCCL's bus bandwidth in the same run, GB/s."""

    channels: int
    fifo_bytes: int
    direct: bool
    predicted_gbps: float
    achieved_gbps: float

    @property
    def error(self) -> float:
        """Return the error relative to NCCL's bus bandwidth."""
        return self.predicted_gbps / self.achieved_gbps - 1


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a run; see the functions below."""

    predictions: tuple[Prediction, ...]
    rank_correlation: float
    best_found: float
    skew_us: float
    skew_error_us: float
    worst_skew_us: float
    overlap: float
    worst_overlap: float
    direct_same_pool: float
    direct_new_pool: float | None
    bounce_same_pool: float
    bounce_new_pool: float | None
    copies: tuple[tuple[str, tuple[float, ...], tuple[float, ...]], ...]
    """Transfers by copy engines: rates by the profiler, and by plain loops."""
    facts: dict[str, object]


Journal = dict[str, list[Measurement]]


def load(folder: Path) -> tuple[list[Journal], dict[str, Any], dict[str, list[float]]]:
    """Read both journals, NCCL's rates, and the plain loops' rates by set."""
    paths = [folder / f"journal-{i}.jsonl" for i in (1, 2)]
    read = [read_journal(path).measurements for path in paths if path.exists()]
    journals = [{str(key): list(measured) for key, measured in rows.items()} for rows in read]
    nccl = json.loads((folder / "nccl.json").read_text())
    return journals, nccl, json.loads((folder / "plain-copies.json").read_text())


def figures(folder: Path) -> RunFigures:
    """Compute all results of the run in `folder`."""
    journals, nccl, plain = load(folder)
    predictions = tuple(predicted(journals[0], row) for row in nccl["rows"])
    bounces = [row for row in predictions if not row.direct]
    rings = {row["set"] for row in nccl["rows"] if not row["direct"]}
    measured = [row for journal in journals for key in rings for row in journal.get(key, ())]
    return RunFigures(
        predictions=predictions,
        rank_correlation=float(
            stats.spearmanr(
                [row.predicted_gbps for row in bounces], [row.achieved_gbps for row in bounces]
            ).statistic
        ),
        best_found=found_best(bounces),
        skew_us=float(np.median([m.skew_us for m in measured])),
        skew_error_us=float(np.median([m.skew_error_us for m in measured])),
        worst_skew_us=max(m.skew_us for m in measured),
        overlap=float(np.median([m.overlap for m in measured])),
        worst_overlap=min(m.overlap for m in measured),
        direct_same_pool=same_pool(journals, is_direct),
        direct_new_pool=new_pool(journals, is_direct),
        bounce_same_pool=same_pool(journals, is_bounce),
        bounce_new_pool=new_pool(journals, is_bounce),
        copies=tuple((text, rates_of(journals, text), tuple(plain[text])) for text in plain),
        facts=json.loads((folder / "facts-1.json").read_text()),
    )


def predicted(journal: Journal, row: dict[str, object]) -> Prediction:
    """Return the mean of the set's medians right before and right after NCCL's run."""
    around = [measurement.rate_gbps for measurement in journal[str(row["set"])][:2]]
    return Prediction(
        channels=row["channels"],
        fifo_bytes=row["fifo_bytes"],
        direct=row["direct"],
        predicted_gbps=float(np.mean(around)),
        achieved_gbps=row["busbw_gbps"],
    )


def found_best(predictions: Sequence[Prediction]) -> float:
    """Return NCCL's rate under the settings predicted best, relative to NCCL's best rate."""
    chosen = max(predictions, key=lambda prediction: prediction.predicted_gbps)
    return chosen.achieved_gbps / max(prediction.achieved_gbps for prediction in predictions)


def is_direct(text: str) -> bool:
    """Check that all flows go from GPU to GPU by kernels."""
    return all(
        not flow.is_bounce
        and {flow.source.kind, flow.destination.kind} == {"G"}
        and not flow.transfers[0].uses_copy_engine
        for flow in parse_set(text).flows
    )


def is_bounce(text: str) -> bool:
    """Check that all flows are bounces by kernels."""
    return all(
        flow.is_bounce and not any(transfer.uses_copy_engine for transfer in flow.transfers)
        for flow in parse_set(text).flows
    )


def repeated_rates(journal: Journal, text: str) -> list[float]:
    """Return rates of a set's measurements, without the two around NCCL's run."""
    rates = [measurement.rate_gbps for measurement in journal[text]]
    return rates[2:] if len(rates) > 5 else rates


def same_pool(journals: Sequence[Journal], chosen) -> float:
    """Return the 95th percentile of |rate / median of its set and pool - 1|, over repeated sets."""
    deviations = [
        abs(rate / np.median(rates) - 1)
        for journal in journals
        for text in journal
        if chosen(text)
        for rates in [repeated_rates(journal, text)]
        if len(rates) > 1
        for rate in rates
    ]
    return float(np.quantile(deviations, 0.95))


def new_pool(journals: Sequence[Journal], chosen) -> float | None:
    """Return the largest |median in pool 1 / median in pool 2 - 1|; None with one pool."""
    if len(journals) < 2:
        return None
    first, second = journals
    return max(
        abs(np.median(repeated_rates(first, text)) / np.median(repeated_rates(second, text)) - 1)
        for text in first
        if text in second and chosen(text)
    )


def rates_of(journals: Sequence[Journal], text: str) -> tuple[float, ...]:
    """Return the median rate of each transfer, in the order of `text`; empty if not measured."""
    key = str(parse_set(text))
    if not any(key in journal for journal in journals):
        return ()
    rows = [measurement.gbps for journal in journals for measurement in journal.get(key, ())]
    by_flow = dict(zip(key.split(), np.median(rows, axis=0), strict=True))
    return tuple(float(by_flow[part]) for part in text.split())


def report(run: RunFigures) -> str:
    """Return the results as text."""
    lines = ["predicted / NCCL's bus bandwidth, GB/s", ""]
    direct = [row for row in run.predictions if row.direct]
    bounces = [row for row in run.predictions if not row.direct]
    for row in direct:
        lines.append(
            f"direct ring, {row.channels} ring channels: {row.predicted_gbps:.1f} / "
            f"{row.achieved_gbps:.1f} ({row.error:+.1%})"
        )
    if len(direct) > 1:
        lines.append(f"direct: channels predicted best get {found_best(direct):.1%} of the best")
    lines += ["", "bounce ring, in the same run", *table(bounces)]
    errors = [abs(row.error) for row in bounces]
    lines += [
        "",
        f"bounce: median error {np.median(errors):.1%}, worst {max(errors):.1%}; order of "
        f"settings: rank correlation {run.rank_correlation:.3f}; settings predicted best get "
        f"{run.best_found:.1%} of the best",
        f"start skew: median {run.skew_us:.2f} us (known to {run.skew_error_us:.1f} us), worst "
        f"{run.worst_skew_us:.2f} us; overlap: median {run.overlap:.4f}, worst "
        f"{run.worst_overlap:.4f}",
        f"again in the same pool (95 of 100 within): direct {run.direct_same_pool:.2%}, bounce "
        f"{run.bounce_same_pool:.2%}",
        f"in a new pool (worst of all sets): direct {share(run.direct_new_pool)}, bounce "
        f"{share(run.bounce_new_pool)}",
        "",
        "| copy engines | profiler | plain cupy loops |",
        "|---|---|---|",
    ]
    lines += [f"| {text} | {rates(ours)} | {rates(plain)} |" for text, ours, plain in run.copies]
    lines += ["", *(f"{name}: {value}" for name, value in run.facts.items())]
    return "\n".join(lines)


def table(predictions: Sequence[Prediction]) -> list[str]:
    """Return a table of predicted / achieved rates, by ring channels and FIFO size."""
    sizes = sorted({row.fifo_bytes for row in predictions})
    lines = ["| ring channels | " + " | ".join(map(size, sizes)) + " |"]
    lines.append("|---|" + "---|" * len(sizes))
    cells = {
        (row.channels, row.fifo_bytes): (
            f"{row.predicted_gbps:.1f} / {row.achieved_gbps:.1f} ({row.error:+.0%})"
        )
        for row in predictions
    }
    for channels in sorted({row.channels for row in predictions}):
        row = [cells.get((channels, count), "") for count in sizes]
        lines.append(f"| {channels} | " + " | ".join(row) + " |")
    return lines


def share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2%}"


def size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB"


def rates(values: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)


if __name__ == "__main__":
    print(report(figures(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED)))
