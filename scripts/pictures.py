"""Pictures of README and outputs of the notebooks, as they are committed.

usage: python -m scripts.pictures

Writes docs/pictures/rings-*.svg from a reference plan, and runs the cells of
examples/*.ipynb; a cell that ends with a value shows the value, drawn where it can be.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any, get_args

from tccl_py.plan.load import load_plan
from tccl_py.report.drawing import Scheme, drawing

ROOT = Path(__file__).resolve().parent.parent
PLAN = ROOT / "plans" / "asus-esc8000a-e13p.json"
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def pictures() -> dict[Path, str]:
    """Return the text of each picture of README, by its file."""
    plan = load_plan(PLAN)
    return {
        ROOT / "docs/pictures" / f"rings-{scheme}{'-narrow' * narrow}.svg": drawing(
            plan, scheme=scheme, narrow=narrow
        )
        for scheme in get_args(Scheme)
        for narrow in (False, True)
    }


def executed(path: Path) -> str:
    """Return a notebook's text with the outputs of its cells, run in order."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    space: dict[str, object] = {}
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(codes, 1):
        *statements, last = ast.parse("".join(cell["source"])).body
        shown = last if isinstance(last, ast.Expr) else None
        body = statements if shown else [*statements, last]
        printed = io.StringIO()
        value = None
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), path.name, "exec"), space)
            if shown:
                value = eval(compile(ast.Expression(shown.value), path.name, "eval"), space)
        cell["execution_count"] = count
        cell["outputs"] = [*_printed(printed.getvalue()), *_shown(value, count)]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _printed(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


def _shown(value: object, count: int) -> list[dict[str, Any]]:
    if value is None:
        return []
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    if draw := getattr(value, "_repr_svg_", None):
        data["image/svg+xml"] = draw().splitlines(keepends=True)
    result = {"output_type": "execute_result", "execution_count": count, "metadata": {}}
    return [result | {"data": data}]


def main() -> None:
    """Write all files."""
    for path, text in pictures().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in NOTEBOOKS:
        path.write_text(executed(path), encoding="utf-8")


if __name__ == "__main__":
    main()
