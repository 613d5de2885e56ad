"""NCCL's choices by message size for a plan: JSON, tables, and why they are poor."""

import json
from itertools import product

import pytest
from msgspec.structs import asdict, replace

from tccl_py.errors import InputError
from tccl_py.files import decode_json, encode_json
from tccl_py.nccl.cost_model import cost_model
from tccl_py.nccl.graph_search import search_ring, search_tree
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.tuner import COLLECTIVES, SizeChoice
from tccl_py.nccl.view import view
from tccl_py.plan.chains import SizeAnswer
from tccl_py.plan.load import check_plan, load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.retuning import retune
from tccl_py.plan.size_choices import (
    SIZES,
    list_by_size,
    size_choices,
    size_notes,
    size_table,
    why_no_sizes,
)
from tests.cluster_plans import equal_hosts
from tests.commands import tccl
from tests.planned import replace_plan
from tests.test_reference_plans import PLANS


def plan_of(name):
    return load_plan(PLANS / f"{name}.json")


def test_rows_are_of_each_collective_and_size_for_default_and_the_recommended_choice():
    plan = plan_of("asus-esc8000a-e13p")
    rows = [asdict(row) for row in list_by_size(plan)]
    assert {row["choice"] for row in rows} == {"default", plan.recommended}
    assert len(rows) == 2 * 5 * len(SIZES)
    keys = {"choice", "collective", "bytes", "algorithm", "protocol", "channels"}
    assert all(set(row) == keys for row in rows)


def test_a_failed_search_is_named_with_its_effect_and_the_remedy():
    plan = plan_of("asus-esc8000a-e13p")
    (note,) = size_notes(plan)
    assert "0.1 GB/s (so it expects far too long times), tree is never taken, and" in note
    assert "2 channels of ring simple" in note
    assert "NCCL_GRAPH_FILE" in note
    default, graph = (rows for rows in size_choices(plan).values())
    small = [(rows[40 + 2].protocol, rows[42].bytes) for rows in (default, graph)]
    assert small == [("simple", 64 << 10), ("ll", 64 << 10)]


def test_a_search_for_trees_alone_that_fails_leaves_one_ring():
    settings = Settings(version="2.32.3")
    plan = plan_of("asus-esc8000a-e13p")
    plan = replace_plan(plan, default=replace(plan.choices["default"], settings=settings))
    (note,) = size_notes(plan)
    assert "search for trees fails" in note
    assert "1 of 2 rings is used" in note


def test_trees_are_only_called_unused_where_no_size_takes_one(monkeypatch):
    plan = plan_of("asus-esc8000a-e13p")
    seen = view(plan.machine, plan.knowledge, plan.choices["default"].settings)
    tree = search_tree(seen, channels=1)
    fine = replace(tree, fallback=False, rate_intra=20.0, rate_inter=20.0)
    half = cost_model(seen, (search_ring(seen), fine))
    monkeypatch.setattr("tccl_py.plan.size_choices.size_model", lambda *_: half)
    (note,) = size_notes(plan)
    assert "graph search fails" in note
    assert "never" not in note


def test_a_rate_that_nccl_counts_wrongly_is_named_with_what_it_costs_and_the_remedy():
    plan = plan_of("amd-v100")
    (note,) = size_notes(plan)
    assert "counts 15.0 GB/s for its rings, which get 4.0 (simulated" in note
    assert "256 KiB of all-reduce take ring ll, 1.48x the time of ring simple" in note
    assert "; NCCL_P2P_LEVEL=SYS changes that" in note
    (note,) = size_notes(replace_plan(plan, variables=plan.choices["default"]))
    assert "tccl verify DIR --tune" in note
    assert not list(
        size_notes(
            replace_plan(plan, default=replace(plan.choices["default"], predicted_gbps=15.0))
        )
    )


def test_where_the_cost_model_has_no_answer_there_are_no_rows_and_it_is_said():
    plan = plan_of("amd-3090")
    settings = replace(plan.choices["default"].settings, version="2.27.7")
    unknown = {
        "of NCCL 2.27.7": replace_plan(
            plan, default=replace(plan.choices["default"], settings=settings)
        ),
        "NVLS": plan_of("nvswitch-8gpu-8nic"),
        "several hosts": equal_hosts(2),
        "dry run": replace(plan, dry_run=True),
        "rings are not": replace_plan(plan, default=replace(plan.choices["default"], rings=())),
    }
    for why, other in unknown.items():
        assert size_choices(other) == {}
        assert list(size_table(other)) == [("collective", "sizes")]
        assert why in why_no_sizes(other)
        assert not list(size_notes(other))


def asked(plan, algorithm="nvls"):
    """The plan with answers of NCCL: 16 channels of one kind at every size."""
    row = {"algorithm": algorithm, "protocol": "simple", "channels": 16}
    rows = tuple(
        SizeChoice(collective=collective, bytes=size, **row)
        for collective, size in product(COLLECTIVES, SIZES)
    )
    return with_answers(plan, dict.fromkeys(("default", plan.recommended), rows))


def with_answers(plan, rows):
    answers = {
        name: SizeAnswer(settings=plan.choices[name].settings, rows=tuple(of))
        for name, of in rows.items()
    }
    return replace(plan, sizes=answers)


def test_answers_of_nccl_are_the_table_wherever_it_was_asked():
    plan = asked(plan_of("nvswitch-8gpu-8nic"))
    header, *rows = size_table(plan)
    assert header == ("collective", "sizes", "default NCCL")
    assert rows[0] == ("broadcast", "4 KiB to 1 GiB", "nvls simple, 16 channels")
    assert (why_no_sizes(plan), list(size_notes(plan))) == ("", [])
    assert decode_json(encode_json(plan), Plan, where="plan.json") == plan


def test_no_reason_is_named_for_choices_that_nccl_did_not_make():
    plan = plan_of("asus-esc8000a-e13p")
    assert not list(size_notes(asked(plan, "tree")))
    notes = list(size_notes(plan))
    assert list(size_notes(with_answers(plan, size_choices(plan)))) == notes != []


def test_answers_under_other_settings_are_no_longer_shown():
    plan = asked(plan_of("asus-esc8000a-e13p"))
    tuned = retune(plan, replace(plan.settings, buffsize=1 << 20))
    assert {row.algorithm for rows in size_choices(plan).values() for row in rows} == {"nvls"}
    assert {row.algorithm for rows in size_choices(tuned).values() for row in rows} == {"ring"}


def test_answers_of_other_sizes_are_no_plan():
    plan = asked(plan_of("asus-esc8000a-e13p"))
    default = plan.sizes["default"]
    fewer = replace(plan, sizes=plan.sizes | {"default": replace(default, rows=default.rows[1:])})
    with pytest.raises(InputError, match="different message sizes"):
        check_plan(fewer, where="plan.json")


def test_show_and_advise_have_the_table(tmp_path):
    plan = plan_of("amd-v100")
    path = tmp_path / "plan.json"
    path.write_text(encode_json(plan))
    shown = tccl("show", str(tmp_path), "--json")
    assert json.loads(shown.stdout)["by_size"] == [asdict(row) for row in list_by_size(plan)]
    usual = tccl("show", str(tmp_path)).stdout
    assert "all_reduce" not in usual and "256 KiB of all-reduce take" in usual
    text = tccl("show", str(tmp_path), "--sizes").stdout
    assert all(name in text for name in ("all_reduce", "ring simple", "broadcast"))
    assert " us" not in text
    advice = json.loads(tccl("advise", "amd-v100", "--json").stdout)
    assert advice["by_size"] == [asdict(row) for row in list_by_size(plan)]
