"""Write docs/json.md and the JSON Schemas in docs/schemas from the results that commands print.

usage: python -m scripts.json_page
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tccl_py.cli.env import Env
from tccl_py.cli.measure import Measured
from tccl_py.cli.show import Difference
from tccl_py.experiments.means_table import MeansTable
from tccl_py.files import TextValue
from tccl_py.health.comparison import HostsCompared
from tccl_py.health.doctor import Diagnosis
from tccl_py.nccl.validator import GraphVerdict
from tccl_py.report.check import Checked
from tccl_py.report.plan import AdviceReport, PlanReport
from tccl_py.report.verification import Verified
from tccl_py.simulator.model import ModelSummary
from tccl_py.sources.pairs import Pair
from tccl_py.workloads.workload import Workload

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEAD = """# JSON keys

Commands that print a table take `--json`. From 0.1.0 on keys are kept: later versions add some and
take none out. Rates are GB/s, a rate that is not known is null, and `environment` is an object of
variables. Each command has a [JSON Schema](https://json-schema.org). Made from the program's own
results by `python -m scripts.json_page`.
"""


COMMANDS: Mapping[str, Any] = {
    "plan": PlanReport,
    "env": Env,
    "verify": Verified,
    "means": MeansTable,
    "check": Checked,
    "advise": AdviceReport,
    "discover": list[ModelSummary],
    "measure": list[Measured],
    "pairs": list[Pair],
    "diff": list[Difference],
    "doctor": Diagnosis,
    "hosts": HostsCompared,
    "validate": GraphVerdict,
    "workload": Workload,
}
TITLES = {
    "plan": "tccl plan, tccl show",
    "means": "tccl verify --means",
    "pairs": "tccl measure without sets",
    "diff": "tccl show of two plans",
    "hosts": "tccl doctor --compare",
}


def of_text(kind: type[Any]) -> dict[str, Any]:
    """Return the schema of a value with a form as text."""
    assert issubclass(kind, TextValue)
    return {"type": "string"}


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a command's output, to which later versions may add keys."""
    made = msgspec.json.schema(COMMANDS[name], schema_hook=of_text)
    for part in made.get("$defs", {}).values():
        if part.get("additionalProperties") is False:
            del part["additionalProperties"]
        # What has a default is printed; what is left out has none.
        keys = part.get("properties", {}).items()
        always = [key for key, of in keys if key in part.get("required", ()) or "default" in of]
        if always:
            part["required"] = always
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def words(part: Mapping[str, Any]) -> str:
    """Return the type of a key in words; types with keys of their own by their names."""
    if "$ref" in part:
        return str(part["$ref"]).rpartition("/")[2]
    if "anyOf" in part:
        return " or ".join(map(words, part["anyOf"]))
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if part.get("type") == "array":
        items = part.get("items") or (part.get("prefixItems") or [{}])[0]
        return f"list of {words(items)}" if items else "list"
    if part.get("type") == "object":
        values = part.get("additionalProperties")
        return f"object of {words(values)}" if isinstance(values, dict) else "object"
    return str(part.get("type", "any"))


def tables(name: str, seen: set[str]) -> Iterator[str]:
    """Yield the tables of a command: its own keys, then those of its types."""
    made = schema(name)
    yield f"\n## {TITLES.get(name, f'tccl {name}')}\n\n[Schema](schemas/{name}.json)"
    if "items" in made:
        yield f"A list of {words(made['items'])}."
    for title, part in made.get("$defs", {}).items():
        if title in seen or "properties" not in part:
            continue
        seen.add(title)
        about = part.get("description", "").partition("\n")[0]
        yield f"\n**{title}**: {about}\n\n| key | type | is |\n|---|---|---|"
        for key, value in part["properties"].items():
            optional = "" if key in part.get("required", ()) else " (not always)"
            yield f"| `{key}` | {words(value)}{optional} | {value.get('description', '')} |"


def pages() -> dict[Path, str]:
    """Return the page and the schemas by their paths."""
    seen: set[str] = set()
    lines = [HEAD.rstrip(), *(line for name in COMMANDS for line in tables(name, seen))]
    files = {DOCS / "json.md": "\n".join(lines) + "\n"}
    for name in COMMANDS:
        text = msgspec.json.format(msgspec.json.encode(schema(name)), indent=1).decode()
        files[DOCS / "schemas" / f"{name}.json"] = text + "\n"
    return files


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
