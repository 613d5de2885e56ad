"""The shape of the product, where no linter counts."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tccl_py"
ASKS = re.compile(
    r"\bis_cluster\b|\b(?:plan|self|made|cluster)\.closes\b|\blen\((?:\w+\.)*hosts\) (?:[<>=!]=?) [012]\b"
)
"""Whether a plan or a cluster is of one host."""
TEXT = ("report", "explanation", "plan/text.py", "plan/size_choices.py", "delivery/scripts.py")
"""The text of a plan, and files of launchers, may say something else of several hosts."""


def test_few_places_ask_whether_a_plan_is_of_one_host():
    paths = (path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "merge")
    asking = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if ASKS.search(line)
    ]
    assert len([place for place in asking if not place.startswith(TEXT)]) <= 18, asking
