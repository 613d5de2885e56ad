"""Write the generated tables of docs/features.md: from tccl_py.nccl.versions and pyproject.toml.

usage: python -m scripts.support_page
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from tccl_py.nccl.versions import say_unchecked, version_facts, why_no_plugin

PAGE = Path(__file__).resolve().parent.parent / "docs" / "features.md"
MARK = "<!-- tables by python -m scripts.support_page -->\n"
RELEASES = (
    "2.18.3", "2.21.5", "2.27.7", "2.28.3", "2.28.9", "2.29.7", "2.30.7", "2.31.2",
    "2.32.3", "2.33.1",
)  # fmt: skip
"""At least one release of each set of rules, and the first that no rules are known for."""


def versions() -> list[str]:
    """Return the rows of releases of NCCL."""
    rows = [
        "| NCCL | rules of | plugin | channels of a graph file | choices by message size | "
        "variables of single communicators |",
        "|---|---|---|---|---|---|",
    ]
    for release in RELEASES:
        facts = version_facts(release)
        rules = facts.name + (", not checked" if say_unchecked(release) else "")
        plugin = "no" if why_no_plugin(release) else "yes"
        sizes = "yes" if facts.has_cost_model else "no"
        own = "yes" if facts.rereads else "no"
        rows.append(f"| {release} | {rules} | {plugin} | {facts.max_channels} | {sizes} | {own} |")
    return rows


def packages() -> list[str]:
    """Return the rows of Python, torch and the other packages."""
    about = metadata.metadata("tccl-py")
    rows = ["| extra | brings |", "|---|---|", f"| none | Python {about['Requires-Python']} |"]
    for extra in about.get_all("Provides-Extra") or ():
        brings = [
            re.split(r"\s*;", line)[0]
            for line in about.get_all("Requires-Dist") or ()
            if re.search(rf"extra == ['\"]{extra}['\"]", line)
        ]
        if extra not in ("docs", "test", "all"):
            rows.append(f"| `[{extra}]` | {', '.join(brings)} |")
    return rows


def page(text: str) -> str:
    """Return the page with its tables made anew."""
    head = text.partition(MARK)[0]
    return "\n".join([head + MARK, *packages(), "", *versions(), ""])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
