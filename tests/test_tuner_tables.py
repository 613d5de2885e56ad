"""Tables of the tuner: what fits a plan, and tuning.json beside it."""

from __future__ import annotations

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.nccl.plugin import LIBRARY
from tccl_py.nccl.tuner import COLLECTIVES, TunerEntry, TunerTable, check_tables, tuner_csv
from tccl_py.plan.directory import write_plan
from tccl_py.plan.results import Tuning, keep_tuning, load_tuning
from tccl_py.plan.staging import check_files, read_manifest
from tests.commands import tccl
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
    text = (place / Tuning.FILE).read_text()
    (place / Tuning.FILE).write_text(text.replace(kept.plan_digest, "0" * 64))
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
    text = (place / Tuning.FILE).read_text()
    assert old in text
    (place / Tuning.FILE).write_text(text.replace(old, new, 1))
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
    assert not (tmp_path / Tuning.FILE).exists()


def test_a_library_built_beside_a_plan_stays_whatever_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("tccl_py.nccl.plugin.INSTALLED", tmp_path / "none")
    plan = plan_of(SMALL)
    write_plan(plan, tmp_path)
    library = tmp_path / "nccl" / LIBRARY
    assert not library.exists()
    library.write_bytes(b"built")
    for write in (
        lambda: keep_tuning(tuning_of(plan), plan, tmp_path),
        lambda: write_plan(plan, tmp_path),
    ):
        write()
        assert library.read_bytes() == b"built"
        check_files(tmp_path)


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


def read_csv(text):
    """What NCCL's example tuner reads, as its README says: lines by number of ranks."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, low, high, algorithm, protocol, channels, nodes, ranks, pipelined, buffer = (
                line.split(",")
            )
            assert (nodes, pipelined, buffer) == ("1", "1", "-1")
            collective = {name.replace("_", ""): name for name in COLLECTIVES}[name]
            row = entry(
                int(low),
                int(high),
                collective=collective,
                algorithm=algorithm,
                protocol=protocol,
                channels=int(channels),
            )
            found.setdefault(int(ranks), []).append(row)
    return found


def test_the_csv_has_what_all_sets_of_a_size_have():
    shared, own = entry(), entry(0, 4 * K, collective="reduce")
    pairs = [table(shared, gpus=gpus) for gpus in ((0, 1), (0, 2))]
    whole = table(own, shared, gpus=(0, 1, 2))
    last = table(own, shared, gpus=(1, 2))
    text, left_out = tuner_csv([*pairs, last, whole], (0, 1, 2))
    assert (read_csv(text), left_out) == ({2: [shared], 3: [own, shared]}, 1)
    text, left_out = tuner_csv([*pairs, whole], (0, 1, 2))
    assert (read_csv(text), left_out) == ({3: [own, shared]}, 2)
    assert read_csv(tuner_csv([], (0, 1, 2))[0]) == {}


def test_export_writes_the_csv_of_a_tuned_plan_alone(tmp_path):
    plan, place = plan_of(SMALL), tmp_path / "plan"
    place.mkdir()
    write_plan(plan, place)
    command = ["export", str(place), "--runtime", "tuner", "-o", str(tmp_path / "csv")]
    assert tccl(*command).exit_code == 2
    keep_tuning(tuning_of(plan, table(entry(), gpus=plan.gpus)), plan, place)
    done = tccl(*command)
    assert done.exit_code == 0
    assert read_csv((tmp_path / "csv").read_text()) == {len(plan.gpus): [entry()]}
    assert tccl(*command).exit_code == 2
    assert tccl(*command[:-2], "--nccl", "2.30").exit_code == 2


def test_tables_do_not_change_once_made():
    with pytest.raises(AttributeError):
        table(entry()).hosts = 2
    assert msgspec.json.decode(msgspec.json.encode(entry()), type=TunerEntry) == entry()
