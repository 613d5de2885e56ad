"""Plans for hosts whose jobs all have a variable that turns NCCL's P2P off or limits it."""

from __future__ import annotations

import json

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.plan.plan import load_plan
from tccl_py.runtimes.nccl.kept import kept_level, limiting
from tests.planned import SMALL, plan_of

OFF = {"NCCL_P2P_DISABLE": "1"}


@pytest.mark.parametrize(
    ("given", "read", "level"),
    [
        (OFF, OFF, "LOC"),
        ({"NCCL_P2P_LEVEL": "PIX"}, {"NCCL_P2P_LEVEL": "PIX"}, "PIX"),
        ({"NCCL_P2P_LEVEL": "0"}, {"NCCL_P2P_LEVEL": "LOC"}, "LOC"),
        ({"NCCL_P2P_LEVEL": "PHB", **OFF}, {**OFF, "NCCL_P2P_LEVEL": "PHB"}, "LOC"),
    ],
)
def test_variables_that_limit_p2p_are_kept_as_nccl_reads_them(given, read, level):
    assert limiting(given, where="kept") == read
    assert kept_level(read) == level


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"NCCL_ALGO": "Ring"}, "kept 'NCCL_ALGO': is no variable that plans can be made under"),
        ({"NCCL_P2P_DISABLE": "0"}, "kept NCCL_P2P_DISABLE: is '0', which limits nothing"),
        ({"NCCL_P2P_DISABLE": "yes"}, "kept NCCL_P2P_DISABLE: is 'yes', which limits nothing"),
        ({"NCCL_P2P_LEVEL": "SYS"}, "kept NCCL_P2P_LEVEL: is 'SYS', which limits nothing"),
        ({"NCCL_P2P_LEVEL": "7"}, "kept NCCL_P2P_LEVEL: is '7', which limits nothing"),
        ({"NCCL_P2P_LEVEL": "pix"}, "kept NCCL_P2P_LEVEL: is 'pix', which limits nothing"),
        ({"NCCL_P2P_LEVEL": ""}, "kept NCCL_P2P_LEVEL: is '', which limits nothing"),
    ],
)
def test_what_limits_no_p2p_is_refused_in_one_sentence(given, what):
    with pytest.raises(InputError, match="^" + what):
        limiting(given, where="kept")


def saved(tmp_path, **changes):
    """The file of a plan in which some fields are others; None takes one out."""
    path = tmp_path / "plan.json"
    plan_of(SMALL).save(path)
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: one for name, one in fields.items() if one is not None}))
    return path


def test_a_plan_of_before_there_were_kept_variables_loads(tmp_path):
    assert load_plan(saved(tmp_path, kept=None)) == plan_of(SMALL)
    assert load_plan(tmp_path).kept == {}


@pytest.mark.parametrize(
    ("kept", "what"),
    [
        ({"PATH": "/"}, "kept 'PATH': is no variable that plans can be made under"),
        ({"NCCL_P2P_LEVEL": "SYS"}, "kept NCCL_P2P_LEVEL: is 'SYS', which limits nothing"),
        ({"NCCL_P2P_LEVEL": "0"}, "kept: has values that no plan has"),
        ({"NCCL_P2P_LEVEL": "PIX"}, "is for jobs with NCCL_P2P_LEVEL=PIX and has p2p_level "),
    ],
)
def test_a_plan_whose_settings_are_not_those_of_its_kept_variables_is_refused(kept, what, tmp_path):
    with pytest.raises(InputError) as error:
        load_plan(saved(tmp_path, kept=kept))
    assert what in str(error.value)
    assert "\n" not in str(error.value)


def test_other_settings_that_a_plan_compares_must_keep_to_its_variables_too(tmp_path):
    plan = plan_of(SMALL)
    settings = msgspec.structs.replace(plan.settings, p2p_level="LOC")
    path = saved(tmp_path, kept=OFF, settings=msgspec.to_builtins(settings))
    with pytest.raises(InputError, match="is for jobs with NCCL_P2P_DISABLE=1 and has p2p_level"):
        load_plan(path)
