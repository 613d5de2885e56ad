"""Write the rows of docs/results.md from what `tccl verify --json` printed on machines.

usage: python -m scripts.results_page [FILE...]

FILEs are added to docs/results/, if they are results of NCCL on GPUs. The page has a row for each
file there and, first, for each recorded verify.json of this project's own runs.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, visible
from tccl_py.experiments.record import Verification
from tccl_py.files import decode_json, encode_json, read_text
from tccl_py.plan.chains import ChoiceName
from tccl_py.report.verification import verification_json

ROOT = Path(__file__).resolve().parent.parent
RECORDED, SENT = ROOT / "tests/cases/verification", ROOT / "docs/results"
PAGE = ROOT / "docs/results.md"
_SHOWN = 60


class ArmRow(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an arm that the page shows."""

    name: ChoiceName
    gbps: float | None
    ratio: float
    low: float
    high: float
    environment: dict[str, str]
    predicted_gbps: float | None
    checked: int
    wrong: list[msgspec.Raw]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of `verify --json` that the page shows."""

    winner: ChoiceName
    arms: list[ArmRow]
    collective: str
    backend: str
    devices: list[str]
    versions: dict[str, str]
    hosts: list[str]


def main() -> None:
    """Add files, all or none, and write the page."""
    try:
        results = {name: read_result(Path(name)) for name in sys.argv[1:]}
    except InputError as error:
        sys.stderr.write(f"results_page: {error}\n")
        sys.exit(2)
    for name, result in results.items():
        SENT.mkdir(exist_ok=True)
        target = re.sub(r"[^a-z0-9-]+", "-", Path(name).stem.lower()).strip("-") or "machine"
        (SENT / f"{target}.json").write_text(encode_json(result))
    PAGE.write_text(page())


def page() -> str:
    """Return the page as it is, with the rows of all files, own results first."""
    files = [*sorted(RECORDED.glob("*.json")), *sorted(SENT.glob("*.json"))]
    head, rule, table = PAGE.read_text().partition("|---|---|---|---|---|---|---|---|---|\n")
    _, end, tail = table.partition("\n\n")
    return head + rule + "\n".join(row(read_result(file), file) for file in files) + end + tail


def read_result(path: Path) -> Result:
    """Read a file of `verify --json`, or a verify.json.

    Raises InputError: something else, a dry run, or wrong values.
    """
    where, text = str(path), read_text(path)
    if '"raw"' in text:
        text = encode_json(verification_json(decode_json(text, Verification, where=where)))
    result = decode_json(text, Result, where=where)
    names = [arm.name for arm in result.arms]
    if result.backend != "cuda" or not result.devices or not result.versions.get("nccl"):
        raise InputError(where, "is no run of NCCL on GPUs", "run `tccl verify` on the machine")
    if names[:1] != ["default"] or result.winner not in names:
        raise InputError(where, "has no winner beside default NCCL", "run `tccl verify` again")
    if result.collective != "all_reduce":
        raise InputError(where, f"is about {result.collective[:40]}", "leave --collective out")
    if any(arm.wrong for arm in result.arms):
        raise InputError(where, "has collectives with wrong values", "report a bug with it")
    return result


def row(result: Result, path: Path) -> str:
    """Return a result as a row of the table."""
    default = result.arms[0]
    best = next(arm for arm in result.arms if arm.name == result.winner)
    gpus = ", ".join(f"{count}x {name}" for name, count in Counter(result.devices).items())
    gpus += f" on {len(result.hosts)} hosts" if result.hosts else ""
    changes = {
        name: value
        for name, value in best.environment.items()
        if default.environment.get(name) != value and name != "NCCL_GRAPH_FILE"
    }
    winner = {"default": "default NCCL", "variables": "variables", "graph": "graph file"}
    words = " with ".join(filter(None, [winner[best.name], _variables(changes)]))
    versions = ", ".join(result.versions.get(name, "?") for name in ("nccl", "driver"))
    changed = best is not default
    cells = [
        *map(_cell, (gpus, _variables(default.environment), words)),
        f"**{best.ratio:.3f}** ({best.low:.3f} to {best.high:.3f})" if changed else "1",
        f"{_gbps(default.gbps)} → {_gbps(best.gbps)}" if changed else _gbps(default.gbps),
        _gbps(best.predicted_gbps),
        f"{sum(arm.checked for arm in result.arms)}",
        _cell(versions),
        f"[{path.stem}](results/{path.name})" if path.parent == SENT else f"`{path.name}`",
    ]
    return "| " + " | ".join(cells) + " |"


def _variables(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(environment.items()))


def _gbps(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1f}"


def _cell(text: str) -> str:
    """Return text for a cell, in which nothing acts."""
    plain = visible(text[: 4 * _SHOWN])
    return re.sub(r"([|<>\[\]`*\\])", r"\\\1", plain)


if __name__ == "__main__":
    main()
