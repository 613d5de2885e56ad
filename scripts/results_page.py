"""Write the rows of docs/results.md and README.md from what `tccl verify --json` printed.

usage: python -m scripts.results_page [FILE...]

FILEs are added to docs/results/, if they are results of NCCL on GPUs. The page has a row for each
file there and, first, for each recorded verify.json of this project's own runs. README has five.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tccl_py.errors import InputError, visible
from tccl_py.experiments.record import Verification
from tccl_py.files import decode_json, encode_json, read_text
from tccl_py.nccl.settings import GRAPH_VARIABLE
from tccl_py.plan.chains import ChoiceName
from tccl_py.plan.text import CHOICE_WORDS
from tccl_py.report.verification import report_verification

ROOT = Path(__file__).resolve().parent.parent
RECORDED, SENT = ROOT / "tests/cases/verification", ROOT / "docs/results"
PAGE, README = ROOT / "docs/results.md", ROOT / "README.md"
IN_README: tuple[tuple[str, ChoiceName], ...] = (
    ("h200x4-vm-no-p2p-large-buffers", "large-buffers"),
    ("h200x4-vm-no-p2p-large-buffers", "variables"),
    ("h200x2-vm-no-p2p-usual", "large-buffers"),
    ("h200x4-vm", "graph"),
    ("h200x2-vm", "graph"),
)
"""Files, and the choice whose speed is told."""
DISPUTED = "h200x4-vm"
"""Of two runs of this machine the other one recommended default NCCL (docs/results/h200x4.md)."""
_SHOWN = 60


class TransferRow(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of another collective than those compared that README shows."""

    collective: str
    groups: list[list[int]]
    ratio: float


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
    transfers: list[TransferRow] = []


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
    README.write_text(readme())


def readme() -> str:
    """Return README as it is, with the rows of its recorded files."""
    return _with_rows(README, 5, [front_row(*each) for each in IN_README])


def front_row(name: str, choice: ChoiceName) -> str:
    """Return a choice of a recorded result as a row of README's table."""
    result = read_result(RECORDED / f"{name}.json")
    default, arm = result.arms[0], next(arm for arm in result.arms if arm.name == choice)
    no_p2p = default.environment.get("NCCL_P2P_DISABLE") == "1"
    gpus = _gpus(result) + (", P2P disabled" if no_p2p else ", NVLink")
    ratio = _ratio(arm)
    if name == DISPUTED:
        ratio = f"no change: {ratio.replace('*', '')} in one run, not in another"
    cells = [_cell(gpus), ratio, _rates(default, arm), _cell(_choice(default, arm))]
    # The largest size comes last; files of earlier versions do not tell.
    ratios = {row.collective: row.ratio for row in arm.transfers if not row.groups}
    transfers = "not measured"
    if ratios:
        transfers = f"{ratios['send_recv']:.2f}, {ratios['all_to_all']:.2f}"
    return "| " + " | ".join([*cells, transfers]) + " |"


def _with_rows(page: Path, columns: int, rows: Sequence[str]) -> str:
    """Return a page with these rows in the place of those of its table of so many columns."""
    head, rule, table = page.read_text().partition("|---" * columns + "|\n")
    _, end, tail = table.partition("\n\n")
    return head + rule + "\n".join(rows) + end + tail


def page() -> str:
    """Return the page as it is, with the rows of all files, own results first."""
    files = [*sorted(RECORDED.glob("*.json")), *sorted(SENT.glob("*.json"))]
    return _with_rows(PAGE, 9, [row(read_result(file), file) for file in files])


def read_result(path: Path) -> Result:
    """Read a file of `verify --json`, or a verify.json.

    Raises InputError: something else, a dry run, or wrong values.
    """
    where, text = str(path), read_text(path)
    if '"raw"' in text:
        text = encode_json(report_verification(decode_json(text, Verification, where=where)))
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
    default, best = _compared(result)
    versions = ", ".join(result.versions.get(name, "?") for name in ("nccl", "driver"))
    cells = [
        *map(_cell, (_gpus(result), _variables(default.environment), _choice(default, best))),
        _ratio(best) if best is not default else "1",
        _rates(default, best),
        _gbps(best.predicted_gbps),
        f"{sum(arm.checked for arm in result.arms)}",
        _cell(versions),
        f"[{path.stem}](results/{path.name})" if path.parent == SENT else f"`{path.name}`",
    ]
    return "| " + " | ".join(cells) + " |"


def _compared(result: Result) -> tuple[ArmRow, ArmRow]:
    """Return default NCCL and the winner."""
    return result.arms[0], next(arm for arm in result.arms if arm.name == result.winner)


def _gpus(result: Result) -> str:
    gpus = ", ".join(f"{count}x {name}" for name, count in Counter(result.devices).items())
    return gpus + (f" on {len(result.hosts)} hosts" if result.hosts else "")


def _choice(default: ArmRow, arm: ArmRow) -> str:
    """Return a choice with the variables that default NCCL did not have."""
    changes = {
        name: value
        for name, value in arm.environment.items()
        if default.environment.get(name) != value and name != GRAPH_VARIABLE
    }
    return " with ".join(filter(None, [CHOICE_WORDS[arm.name], _variables(changes)]))


def _ratio(best: ArmRow) -> str:
    return f"**{best.ratio:.3f}** ({best.low:.3f} to {best.high:.3f})"


def _rates(default: ArmRow, best: ArmRow) -> str:
    rates = [_gbps(default.gbps), _gbps(best.gbps)]
    return " → ".join(rates if best is not default else rates[:1])


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
