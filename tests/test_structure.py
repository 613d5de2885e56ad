"""The shape of the product, where no linter counts."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tccl_py"
ASKS = re.compile(
    r"\bis_cluster\b|\b(?:plan|self)\.closes\b|\blen\((?:\w+\.)*hosts\) (?:[<>=!]=?) [012]\b"
)
"""Whether a plan or a cluster is of one host."""


def test_few_places_ask_whether_a_plan_is_of_one_host():
    asking = {
        f"{path.relative_to(PACKAGE)}:{number}": line.strip()
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in (".py", ".html") and path.parent.name != "merge"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if ASKS.search(line)
    }
    assert len(asking) <= 29, asking
