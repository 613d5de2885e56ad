"""The examples run, and say where their figures come from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tccl_py
from tccl_py.model.symmetry import automorphisms
from tccl_py.search.problem import SearchProblem
from tccl_py.search.strategies import find_rings
from tccl_py.tccl_fork.search import free_hop_space

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "read_plan.py": ("ring 0: (0, 3, 1, 2)", "simulated from assumed figures", "<- slowest"),
    "own_strategy.py": ("two_opt: ", "no bound", "best-first: ", "simulated"),
    "plan_from_topo_text.py": ("assumed: every GPU's link", "simulated from assumed figures"),
    "measure_own_sets.py": ("(host backend)", "95 % interval", "overlap"),
    "plan_a_cluster.py": ("order: ", "from N0 over GPUs", "simulated from assumed figures"),
}


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_and_says_where_its_figures_are_from(name):
    printed = run(name)
    assert [text for text in SAYS[name] if text not in printed] == []


def test_a_plan_from_text_keeps_its_assumptions(tmp_path):
    run("plan_from_topo_text.py", EXAMPLES / "topo-m.txt", tmp_path / "plan.json")
    plan = tccl_py.load_plan(tmp_path / "plan.json")
    assert plan.assumed and plan.simulated
    assert sum(notice.startswith("assumed: ") for notice in plan.notices) == 5


def test_a_strategy_of_ones_own_is_named_after_itself_and_proves_nothing():
    model = tccl_py.load_machine("amd-v100")
    problem = SearchProblem(
        spaces={1: free_hop_space(model.machine, model.knowledge)},
        source=tccl_py.Simulator(model),
        symmetry=automorphisms(model.machine, model.knowledge),
    )

    def ascending(run):
        run.offer_orders([(run.problem.gpus,)])

    class Twice:
        def __call__(self, run):
            ascending(run)
            ascending(run)

    result = find_rings(problem, strategy=ascending)
    assert (result.strategy, result.bound_gbps, result.proven) == ("ascending", None, False)
    assert result.rings.rings[0].gpus == (0, 1, 2, 3)
    assert find_rings(problem, strategy=Twice()).strategy == "Twice"
