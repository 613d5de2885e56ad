"""Writes docs/api.md below its mark, from signatures and docstrings of the code.

usage: python -m scripts.api_page
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
MARK = "<!-- by python -m scripts.api_page -->\n"
LISTED = {
    "Machines": """tccl_py.simulator.descriptions.load_machine
        tccl_py.simulator.descriptions.bundled_names tccl_py.readers.live.discover_machine""",
    "Transfers": """tccl_py.model.transfer.parse_set tccl_py.model.transfer.parse_flow
        tccl_py.model.transfer.Flow tccl_py.model.transfer.TransferSet""",
    "Sources of rates": """tccl_py.sources.opening.open_source tccl_py.sources.hosts.open_hosts
        tccl_py.sources.profiled.MeasurementOptions tccl_py.simulator.source.Simulator
        tccl_py.model.measurement.BandwidthSource tccl_py.model.measurement.Measurement""",
    "Plans": """tccl_py.planning.planner.make_plan tccl_py.planning.request.PlanRequest
        tccl_py.planning.handle.PlanHandle
        tccl_py.plan.plan.Plan tccl_py.planning.handle.load_plan tccl_py.plan.text.diff
        tccl_py.explanation.explain.explain tccl_py.report.drawing.drawing
        tccl_py.plan.chains.PlanHop tccl_py.plan.chains.Choice tccl_py.nccl.settings.Settings""",
    "Clusters": """tccl_py.model.reports.HostReport tccl_py.model.reports.cluster_of
        tccl_py.model.cluster.Cluster tccl_py.model.cluster.Host tccl_py.model.cluster.NodeClass
        tccl_py.readers.switches.read_switches tccl_py.readers.switches.Interconnect
        tccl_py.model.cluster.SwitchTree tccl_py.planning.planner.make_cluster_plan
        tccl_py.plan.directory.write_plan tccl_py.plan.chains.PlannedHost
        tccl_py.plan.chains.HostPath tccl_py.plan.chains.PlanChain""",
    "Searching": """tccl_py.search.strategies.find_rings tccl_py.planning.request.search_problem
        tccl_py.search.problem.SearchProblem tccl_py.search.problem.Budget
        tccl_py.search.problem.SearchResult tccl_py.search.strategies.Run
        tccl_py.model.rings.HopSpace tccl_py.model.rings.RingSet""",
    "Errors": "tccl_py.errors.TcclError tccl_py.errors.InputError",
    "Measuring hardware": """tccl_profiler.session.Session tccl_profiler.profiler.Profiler
        tccl_profiler.profiler.Options tccl_profiler.precision.Stopping
        tccl_profiler.precision.WindowLimits""",
}
"""The names of the page by section; those that are not in `tccl_py.__all__` have their module."""
_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)
_LIST = re.compile(r"^(?:Args|Attributes|Yields|Returns):\n((?: +.*\n?|\n(?= ))+)", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def page(text: str) -> str:
    """Return the page with what follows its mark written anew."""
    return text.partition(MARK)[0] + MARK + "".join(_sections())


def _sections() -> Iterator[str]:
    for title, names in LISTED.items():
        yield f"\n## {title}\n"
        for name in names.split():
            module, _, attribute = name.rpartition(".")
            source = textwrap.dedent(inspect.getsource(getattr(import_module(module), attribute)))
            (node,) = ast.parse(source).body
            yield f"\n### {attribute}\n\n`{name}`\n"
            yield from _of_class(node) if isinstance(node, ast.ClassDef) else _of_function(node)


def _of_function(node: Any, owner: str = "") -> Iterator[str]:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = node.args
    arguments.args = [one for one in arguments.args if one.arg not in ("self", "cls")]
    shown = f"{owner}{node.name}({ast.unparse(arguments)})"
    if len(shown + returns) > 90:
        parts = re.split(r", (?=[*\w]+(?::|$|=|,))", ast.unparse(arguments))
        shown = f"{owner}{node.name}(\n    " + ",\n    ".join(parts) + ",\n)"
    yield f"\n```python\n{shown}{returns}\n```\n\n{_markdown(node)}\n"


def _of_class(node: ast.ClassDef) -> Iterator[str]:
    yield f"\n{_markdown(node)}\n"
    fields, methods = list[str](), list[Any]()
    for one, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_"):
            words = following.value.value if _is_text(following) else ""
            value = f" = {ast.unparse(one.value)}" if one.value else ""
            fields.append(
                _bullet(f"{ast.unparse(one.target)}: {ast.unparse(one.annotation)}{value}", words)
            )
        elif isinstance(one, Function) and not one.name.startswith("_"):
            if any("property" in ast.unparse(each) for each in one.decorator_list):
                kind = f": {ast.unparse(one.returns)}" if one.returns else ""
                fields.append(_bullet(f"{one.name}{kind}", ast.get_docstring(one) or ""))
            else:
                methods.append(one)
        elif isinstance(one, Function) and one.name == "__init__":
            one.name, one.returns = node.name, None
            yield from (part.rstrip() + "\n" for part in _of_function(one))
    yield "\n" * bool(fields) + "".join(fields)
    for method in methods:
        yield from _of_function(method, f"{node.name}.")


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def _bullet(name: str, words: str) -> str:
    said = " ".join(_EXAMPLE.sub("", words).split())
    return f"- `{name}`{': ' * bool(said)}{said}\n"


def _markdown(node: Any) -> str:
    """Return a docstring as Markdown: examples in fences, lists of arguments as lists."""

    def listed(found: re.Match[str]) -> str:
        rows = re.sub(r"\n +(?! *\w+: )", " ", textwrap.dedent(found[1]).strip())
        return re.sub(r"^(\w+): ", r"- `\1`: ", rows, flags=re.MULTILINE) + "\n"

    text = _LIST.sub(listed, (ast.get_docstring(node) or "") + "\n").strip()
    return _EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
