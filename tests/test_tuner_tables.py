"""Tables of the tuner: what fits a plan, and tuning.json beside it."""

from __future__ import annotations

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.nccl.tuner import TunerEntry, TunerTable, check_tables
from tccl_py.plan.directory import write_plan
from tccl_py.plan.staging import check_files, read_manifest
from tccl_py.plan.tuned import TUNING_FILE, Tuning, keep_tuning, load_tuning
from tests.planned import SMALL, plan_of

K = 1024


def entry(first=128 * K, last=512 * K, **changes):
    given = {"collective": "all_reduce", "algorithm": "ring", "protocol": "ll", "channels": 8}
    return TunerEntry(from_bytes=first, to_bytes=last, **given | changes)


def table(*entries, gpus=(0, 1), **changes):
    return TunerTable(**{"gpus": gpus, "measured_on": gpus, "entries": entries} | changes)


def test_tables_in_order_fit():
    gather = entry(0, 4 * K, collective="all_gather")
    one = table(gather, entry(), entry(512 * K + 1, 1 << 40, algorithm="tree", channels=0))
    check_tables((one, table(gpus=(2, 3), measured_on=(0, 1))), (0, 1, 2, 3), where="here")


@pytest.mark.parametrize(
    "found",
    [
        (table(entry(9, 8)),),
        (table(entry(-1)),),
        (table(entry(0, 1 << 60)),),
        (table(entry(channels=65)),),
        (table(entry(channels=-1)),),
        (table(entry(collective="broadcast", algorithm="tree")),),
        (table(entry(), entry(512 * K)),),
        (table(entry(), entry(0, 1, collective="all_gather")),),
        (table(entry()), table(entry())),
        (table(entry(), gpus=(0,)),),
        (table(entry(), gpus=(1, 0)),),
        (table(entry(), gpus=(0, 9)),),
        (table(entry(), measured_on=(0, 1, 2)),),
        (table(entry(), hosts=2),),
    ],
)
def test_tables_that_nccl_or_the_plan_cannot_have_are_refused(found):
    with pytest.raises(InputError):
        check_tables(found, (0, 1, 2, 3), where="here")


def tuning_of(plan, *tables):
    return Tuning(choice=plan.recommended, nccl="2.28.9", tables=tables)


def test_tuning_is_read_back_and_belongs_to_its_plan_alone(tmp_path):
    plan, place = plan_of(SMALL), tmp_path
    write_plan(plan, place)
    tuning = tuning_of(plan, table(entry()))
    assert load_tuning(plan, place) is None
    kept = keep_tuning(tuning, plan, place)
    assert kept.plan_digest
    assert load_tuning(plan, place) == kept
    text = (place / TUNING_FILE).read_text()
    (place / TUNING_FILE).write_text(text.replace(kept.plan_digest, "0" * 64))
    assert load_tuning(plan, place) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"ring"', '"nvls"'),
        ('"ll"', '"fast"'),
        ("131072", '"x"'),
        ('"hosts"', '"homes"'),
        ("{", ""),
    ],
)
def test_damaged_tuning_is_refused(tmp_path, old, new):
    plan, place = plan_of(SMALL), tmp_path
    write_plan(plan, place)
    keep_tuning(tuning_of(plan, table(entry())), plan, place)
    text = (place / TUNING_FILE).read_text()
    assert old in text
    (place / TUNING_FILE).write_text(text.replace(old, new, 1))
    with pytest.raises(InputError):
        load_tuning(plan, place)


def test_tables_reach_the_index_and_other_findings_stay(tmp_path):
    plan = plan_of(SMALL)
    write_plan(plan, tmp_path)
    index, finding = tmp_path / "nccl" / "plugin.index", tmp_path / "verify.json"
    plain, identity = index.read_bytes(), read_manifest(tmp_path).identity
    finding.write_text("{}")
    lone = table(entry(0, 4 * K, collective="all_gather", channels=0), gpus=(1, 2))
    keep_tuning(tuning_of(plan, lone, table(entry())), plan, tmp_path)
    found = [line for line in index.read_text().splitlines() if line.startswith("tune")]
    right = ["0,1 all_reduce 131072 524288 ring ll 8", "1,2 all_gather 0 4096 ring ll 0"]
    assert found == [f"tune {line}" for line in right]
    assert finding.exists()
    check_files(tmp_path)
    assert read_manifest(tmp_path).identity == identity
    keep_tuning(tuning_of(plan), plan, tmp_path)
    assert index.read_bytes() == plain
    write_plan(plan, tmp_path)
    assert not (tmp_path / TUNING_FILE).exists()


@pytest.mark.parametrize(
    ("changes", "spoilt"),
    [({"choice": "none"}, ""), ({}, "nccl/plugin.index"), ({}, "nccl/graph.xml")],
)
def test_tuning_of_another_choice_or_of_changed_files_is_not_written(tmp_path, changes, spoilt):
    plan = plan_of(SMALL)
    write_plan(plan, tmp_path)
    index = tmp_path / "nccl" / "plugin.index"
    if spoilt:
        with (tmp_path / spoilt).open("a") as file:
            file.write("\n")
    before = index.read_bytes()
    with pytest.raises(InputError):
        keep_tuning(msgspec.structs.replace(tuning_of(plan), **changes), plan, tmp_path)
    assert index.read_bytes() == before


def test_tables_do_not_change_once_made():
    with pytest.raises(AttributeError):
        table(entry()).hosts = 2
    assert msgspec.json.decode(msgspec.json.encode(entry()), type=TunerEntry) == entry()
