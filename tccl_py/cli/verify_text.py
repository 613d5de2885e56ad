"""A verification as text for people, and as the JSON whose keys are kept stable."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tccl_py.report.words import settings_words
from tccl_py.verification.comparison import FALSE_RATE, SMALLEST_EFFECT
from tccl_py.verification.orders import is_large, size_text
from tccl_py.verification.record import SizeResult, Tried, Verification

_SHOWN_WRONG = 5


def verification_json(found: Verification) -> dict[str, Any]:
    """What `verify --json` prints; verify.json has all timings beside."""
    rings = found.rings
    return {
        "machine": found.machine,
        "accepted": found.accepted,
        "verdict": found.verdict,
        "plan_gbps": found.plan_gbps,
        "stock_gbps": found.stock_gbps,
        "predicted_gbps": found.predicted_gbps,
        "simulated": found.simulated,
        "sizes": [_size_json(one) for one in found.sizes],
        "not_recommended": found.worse_sizes,
        "checked": found.checked,
        "wrong": found.wrong,
        "rings": None if rings is None else {"same": rings.same, "differences": rings.differences},
        "training": [
            {"mode": one.mode, "ratio": one.compared.ratio, "verdict": one.verdict}
            for one in found.training
        ],
        "tried": found.tried,
        "settings": msgspec.to_builtins(found.settings),
        "failure": found.failure,
        "pairs": len(found.order) // 2,
        "seconds": found.seconds,
        "hosts": found.hosts,
    }


def _size_json(one: SizeResult) -> dict[str, Any]:
    return {
        "bytes": one.bytes,
        "plan_gbps": one.plan_gbps,
        "stock_gbps": one.stock_gbps,
        "plan_us": statistics.median(one.plan_seconds) * 1e6,
        "stock_us": statistics.median(one.stock_seconds) * 1e6,
        "ratio": one.compared.ratio,
        "low": one.compared.low,
        "high": one.compared.high,
        "verdict": one.verdict,
    }


def print_verification(found: Verification, console: Console) -> None:
    """Print the answer, the sizes, and what it rests on."""
    of = ",".join(found.hosts) if found.hosts else f"GPUs {','.join(map(str, found.gpus))}"
    backend = "over NCCL" if found.backend == "cuda" else "rehearsed over gloo"
    console.print(f"The plan of {found.machine}, {of}, {backend}: {_answer(found)}")
    if found.sizes:
        console.print(_table(found))
    for one in found.training:
        console.print(
            f"a training step, {one.mode}: {one.compared.ratio:.3f} of stock's speed "
            f"({one.compared.low:.3f} to {one.compared.high:.3f}), {one.verdict}"
        )
    for line in _facts(found):
        console.print(line)


def _answer(found: Verification) -> str:
    if found.failure:
        return f"no, its job failed: {found.failure}"
    if found.wrong:
        return f"no, {len(found.wrong)} values are wrong"
    if found.worse_sizes:
        sizes = ", ".join(map(size_text, found.worse_sizes))
        return f"no, it is worse than stock NCCL, and not recommended, at {sizes}"
    if any(one.verdict == "worse" for one in found.training):
        return "no, a training step is slower than with stock NCCL"
    if found.rings is not None and not found.rings.same:
        return "no, NCCL does not do what was planned"
    return f"yes, {found.verdict}" if found.verdict == "better" else "yes, as fast as stock NCCL"


def _table(found: Verification) -> Table:
    table = Table("size", "plan us", "stock us", "plan GB/s", "stock GB/s", "ratio", "95 %", "")
    for one in found.sizes:
        compared = one.compared
        table.add_row(
            size_text(one.bytes),
            f"{statistics.median(one.plan_seconds) * 1e6:.1f}",
            f"{statistics.median(one.stock_seconds) * 1e6:.1f}",
            f"{one.plan_gbps:.2f}",
            f"{one.stock_gbps:.2f}",
            f"{compared.ratio:.3f}",
            f"{compared.low:.3f} to {compared.high:.3f}",
            one.verdict,
        )
    return table


def _facts(found: Verification) -> list[str]:
    lines = []
    if found.plan_gbps is not None:
        kind = "simulated" if found.simulated else "measured"
        kind += " from assumed figures" if found.assumed else ""
        share = found.plan_gbps / found.predicted_gbps
        before = f"predicted {found.predicted_gbps:.2f} GB/s ({kind})"
        if found.tuned:
            before = f"{found.predicted_gbps:.2f} GB/s in one job when it was tuned"
        achieved = f"achieved {found.plan_gbps:.2f} {_where(found)}: {share:.0%} of it"
        lines.append(f"{before}, {achieved}")
    lines += [
        f"wrong: {one.case}, rank {one.rank}: {one.what}" for one in found.wrong[:_SHOWN_WRONG]
    ]
    if found.checked and not found.wrong:
        lines.append(f"{found.checked} results of collectives compared, all right")
    if found.left_out:
        lines.append(f"not in this backend: {', '.join(found.left_out)}")
    if found.rings is not None:
        lines += found.rings.differences
        if found.rings.same:
            lines.append(f"NCCL runs the plan's rings on all {len(found.rings.found)} channels")
    lines += [_tried(one) for one in found.tried]
    pairs = len(found.order) // 2
    if pairs:
        at_once = f", {found.at_once} at once in turns," if found.at_once > 1 else ""
        lines.append(
            f"{pairs} pairs of jobs{at_once} in {found.seconds:.0f} s. Under {SMALLEST_EFFECT:.0%} "
            f"counts as the same; of 100 such tables of equal sides {100 * FALSE_RATE:.0f} at most "
            "have a size that is called better or worse."
        )
    return lines


def _where(found: Verification) -> str:
    """Where a plan's rate was taken: at one size, if none of those timed is large."""
    largest = max(one.bytes for one in found.sizes)
    return "at the large sizes" if is_large(largest) else f"at {size_text(largest)}"


def _tried(one: Tried) -> str:
    name = "stock" if one.settings is None else settings_words(one.settings)
    if one.failed:
        return f"tried {name}: failed: {one.failed}"
    return f"tried {name}: {one.gbps:.2f} GB/s, {one.low:.3f} of stock at its worst size"
