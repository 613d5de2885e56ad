"""The examples run, and say where their figures come from."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tccl_py
from scripts.pictures import NOTEBOOKS, executed, pictures

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "read_plan.py": ("ring 0: (0, 3, 1, 2)", "simulated from assumed values", "<- slowest"),
    "rate_rings.py": ("the plan's 2 rings: ", "default NCCL: ", "(simulated)"),
    "own_source.py": ("rings ((0, 3, 1, 2),): ", "simulated", "ring (0, 2, 1, 3): "),
    "write_and_reopen.py": ("differences: none", "tccl show --why: ", "amd-3090: no drift"),
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
def test_an_example_runs_anywhere_and_says_where_its_figures_are_from(name, run):
    printed = run(name)
    assert [text for text in SAYS[name] if text not in printed] == []


def test_every_notebook_is_run():
    assert {path.name for path in NOTEBOOKS} == set(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_the_outputs_of_its_cells_with_drawings_that_a_code_host_shows(path):
    text = path.read_text(encoding="utf-8")
    assert executed(path) == text, "run python -m scripts.pictures"
    assert [words for words in SHOWN[path.name] if words not in text] == []
    drawn = [
        "".join(output["data"]["image/svg+xml"])
        for cell in json.loads(text)["cells"]
        for output in cell.get("outputs", ())
        if "image/svg+xml" in output.get("data", {})
    ]
    assert drawn
    for svg in drawn:
        ElementTree.fromstring(svg)
        assert "iframe" not in svg


def test_the_pictures_of_the_readme_are_drawn_from_a_plan_for_light_and_dark_pages():
    drawn = pictures()
    assert {path.name for path in drawn} == {
        f"rings-{page}{width}.svg" for page in ("light", "dark") for width in ("", "-narrow")
    }
    assert all(path.read_text(encoding="utf-8") == text for path, text in drawn.items())
    assert all("prefers-color-scheme" not in text for text in drawn.values())
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    assert all(f"docs/pictures/{path.name}" in readme for path in drawn)


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
