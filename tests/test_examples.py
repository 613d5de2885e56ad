"""The examples run, and say where their figures come from."""

from __future__ import annotations

import ast
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tccl_py

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "read_plan.py": ("ring 0: (0, 3, 1, 2)", "simulated from assumed values", "<- slowest"),
    "rate_rings.py": ("the plan's 2 rings: ", "default NCCL: ", "(simulated)"),
    "own_source.py": ("rings ((0, 3, 1, 2),): ", "simulated", "ring (0, 2, 1, 3): "),
    "write_and_reopen.py": ("differences: none", "tccl explain: ", "amd-3090: no drift"),
    "own_strategy.py": ("two_opt: ", "no bound", "best-first: ", "simulated"),
    "plan_from_topo_text.py": ("assumed: every GPU's link", "simulated from assumed values"),
    "measure_own_sets.py": ("(host backend)", "95 % interval", "overlap"),
    "plan_a_cluster.py": ("order: ", "from N0 over GPUs", "swapped: ", "simulated from assumed"),
}


SHOWN = {
    "plan_and_read.ipynb": ("simulated", "graph", "ring 0: G0 to G"),
    "explain_and_what_if.ipynb": ("simulated from assumed values", "times slower", "(0, 1, 2, 3)"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs an example by its name, out of this repository as where the package is installed."""
    place = shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("elsewhere") / "examples")
    return functools.partial(_run, place)


def _run(place, name, *arguments):
    command = [sys.executable, name, *map(str, arguments)]
    result = subprocess.run(
        command, cwd=place, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_anywhere_and_says_where_its_figures_are_from(name, run, tmp_path):
    printed = run(name, *[tmp_path] * (name == "write_and_reopen.py"))
    assert [text for text in SAYS[name] if text not in printed] == []


def test_every_notebook_is_run():
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_the_cells_of_a_notebook_run_in_order_and_are_kept_without_outputs(name, capsys):
    notebook = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    space: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        *statements, last = ast.parse("".join(cell["source"])).body
        if isinstance(last, ast.Expr):
            # As a notebook does, a cell that ends with a value shows the value.
            show = ast.parse("print(repr(0))").body[0]
            show.value.args[0].args[0] = last.value
            last = show
        code = ast.fix_missing_locations(ast.Module(body=[*statements, last], type_ignores=[]))
        exec(compile(code, name, "exec"), space)
    printed = capsys.readouterr().out
    assert [text for text in SHOWN[name] if text not in printed] == []


def test_a_plan_from_text_keeps_its_assumptions(run, tmp_path):
    run("plan_from_topo_text.py", EXAMPLES / "topo-m.txt", tmp_path / "plan.json")
    plan = tccl_py.load_plan(tmp_path / "plan.json")
    assert plan.assumed and plan.simulated
    assert sum(notice.startswith("assumed: ") for notice in plan.notices) == 5


def test_a_strategy_of_ones_own_is_named_after_itself_and_proves_nothing():
    model = tccl_py.load_machine("amd-v100")
    parts = model.machine, model.knowledge, tccl_py.Simulator(model)
    problem = tccl_py.search_problem(*parts)

    def ascending(run):
        run.offer_known([(run.problem.gpus,)])

    class Twice:
        def __call__(self, run):
            ascending(run)
            ascending(run)

    result = tccl_py.find_rings(problem, strategy=ascending)
    assert (result.strategy, result.bound_gbps, result.proven) == ("ascending", None, False)
    assert result.rings.rings[0].gpus == (0, 1, 2, 3)
    assert tccl_py.find_rings(problem, strategy=Twice()).strategy == "Twice"
    plan = tccl_py.make_plan(*parts, strategy=ascending, ring_counts=[1])
    assert (plan.strategy, plan.ring_count, plan.proven) == ("ascending", 1, False)
    assert plan.rate_gbps == tccl_py.make_plan(*parts, strategy="nccl-order").rate_gbps
