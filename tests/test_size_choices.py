"""NCCL's choices by message size for a plan: JSON, tables, and why they are poor."""

import json

from msgspec.structs import replace
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.files import encode_json
from tccl_py.nccl.cost_model import cost_model
from tccl_py.nccl.graph_search import search_ring, search_tree
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.view import view
from tccl_py.plan.load import load_plan
from tccl_py.plan.size_choices import SIZES, size_choices, size_json, size_notes, size_table
from tests.test_reference_plans import PLANS


def plan_of(name):
    return load_plan(PLANS / f"{name}.json")


def test_rows_are_of_each_collective_and_size_for_default_and_the_recommended_choice():
    plan = plan_of("asus-esc8000a-e13p")
    rows = size_json(plan)
    assert {row["choice"] for row in rows} == {"default", plan.recommended}
    assert len(rows) == 2 * 5 * len(SIZES)
    keys = {"choice", "collective", "bytes", "algorithm", "protocol", "channels", "estimated_us"}
    assert all(set(row) == keys for row in rows)


def test_a_failed_search_is_named_with_its_effect_and_the_remedy():
    plan = plan_of("asus-esc8000a-e13p")
    (note,) = size_notes(plan)
    assert "0.1 GB/s, tree is never taken, and" in note
    assert "2 channels of ring simple" in note
    assert "NCCL_GRAPH_FILE" in note
    default, graph = (rows for rows in size_choices(plan).values())
    small = [(rows[40 + 2].protocol, rows[42].bytes) for rows in (default, graph)]
    assert small == [("simple", 64 << 10), ("ll", 64 << 10)]


def test_a_search_for_trees_alone_that_fails_leaves_one_ring():
    settings = Settings(version="2.32.3")
    plan = plan_of("asus-esc8000a-e13p")
    plan = replace(plan, stock=replace(plan.stock, settings=settings))
    (note,) = size_notes(plan)
    assert "search for trees fails" in note
    assert "1 of 2 rings is used" in note


def test_trees_are_only_called_unused_where_no_size_takes_one(monkeypatch):
    plan = plan_of("asus-esc8000a-e13p")
    seen = view(plan.machine, plan.knowledge, plan.stock.settings)
    tree = search_tree(seen, channels=1)
    fine = replace(tree, fallback=False, rate_intra=20.0, rate_inter=20.0)
    half = cost_model(seen, (search_ring(seen), fine))
    monkeypatch.setattr("tccl_py.plan.size_choices._searched", lambda *_: half)
    (note,) = size_notes(plan)
    assert "graph search fails" in note
    assert "never" not in note


def test_nothing_is_said_where_no_model_is_known_or_variables_replace_it():
    plan = plan_of("amd-3090")
    old = replace(
        plan, stock=replace(plan.stock, settings=replace(plan.stock.settings, version="2.27.7"))
    )
    forced = replace(plan, pinned_env={"NCCL_PROTO": "Simple"})
    for other in (old, forced):
        assert size_choices(other) == {}
        assert list(size_table(other)) == [("collective", "sizes")]
        assert size_notes(other) == []


def test_nvls_is_named_as_missing_unless_it_is_off():
    plan = plan_of("nvswitch-8gpu-8nic")
    assert "NVLS" in size_notes(plan)[0]
    assert size_notes(replace(plan, pinned_env={"NCCL_NVLS_ENABLE": "0"})) == []


def test_show_and_advise_have_the_table(tmp_path):
    plan = plan_of("amd-v100")
    path = tmp_path / "plan.json"
    path.write_text(encode_json(plan))
    shown = CliRunner().invoke(app, ["show", str(tmp_path), "--json"])
    assert json.loads(shown.stdout)["by_size"] == size_json(plan)
    text = CliRunner().invoke(app, ["show", str(tmp_path)]).stdout
    assert "all_reduce" in text
    advice = json.loads(CliRunner().invoke(app, ["advise", "amd-v100", "--json"]).stdout)
    assert advice["by_size"] == size_json(plan)
