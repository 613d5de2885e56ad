"""The measurement journal."""

import msgspec
import pytest

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.measurement import BandwidthSource, JournalHeader, Measurement
from tccl_py.model.transfer import parse_set
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import JournalFile, read_journal
from tccl_py.sources.opening import open_source

HEADER = JournalHeader(machine="toy", identity="model 1", simulated=True)
ONE, TWO = parse_set("G0->G0->G1"), parse_set("G1->G1->G0")


class Counting:
    simulated = True

    def __init__(self):
        self.calls = []

    def measure(self, sets):
        self.calls += [str(one) for one in sets]
        return [
            Measurement(
                transfers=key, samples_gbps=((1.5, 2.0),) * len(key), simulated=self.simulated
            )
            for key in sets
        ]


def test_a_resumed_run_measures_nothing_twice(tmp_path):
    source, path = Counting(), tmp_path / "m.jsonl"
    with Bench(source, journal=JournalFile(path, HEADER)) as journal:
        first = journal.measure([ONE])
    with Bench(source, journal=JournalFile(path, HEADER)) as journal:
        assert journal.measure([ONE, TWO])[0] == first[0]
        assert journal.sets_remembered == 1
        assert isinstance(journal, BandwidthSource)
    assert source.calls == [str(ONE), str(TWO)]


@pytest.mark.parametrize("cut", [1, 2, 9])
def test_a_torn_last_line_is_dropped_with_a_notice_and_measured_again(tmp_path, cut):
    source, path = Counting(), tmp_path / "m.jsonl"
    with Bench(source, journal=JournalFile(path, HEADER)) as journal:
        journal.measure([ONE, TWO])
    path.write_bytes(path.read_bytes()[:-cut])
    torn = len(path.read_text().split("\n")[-1])
    with Bench(source, journal=JournalFile(path, HEADER)) as journal:
        assert " dropped a torn last" in journal.notices[0] and f"{torn}" in journal.notices[0]
        journal.measure([ONE, TWO])
    assert source.calls == [str(ONE), str(TWO), str(TWO)]
    assert len(read_journal(path).measurements) == 2


def test_a_journal_that_can_only_be_read_answers_for_its_own_machine_alone(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    with open_source("amd-v100", journal=path) as source:
        source.measure("0:1")
    monkeypatch.setattr("tccl_py.sources.bench.os.access", lambda *_: False)
    same, other = open_source("amd-v100"), open_source("intel-v100")
    same.keep_in(path, optional=True)
    same.measure("0:1")
    assert same.times_measured == 0
    with pytest.raises(InputError, match=r"belongs to machine amd-v100 .*, not to .*intel-v100"):
        other.keep_in(path, optional=True)


@pytest.mark.parametrize("simulated", [True, False])
def test_only_hardware_is_asked_in_random_order_and_all_answers_are_in_the_order_given(simulated):
    source = Counting()
    source.simulated = simulated
    sets = [parse_set(f"G0->G0->G{i + 1}") for i in range(14)]
    answers = Bench(source).measure(sets)
    assert [one.transfers for one in answers] == sets
    assert sorted(source.calls) == sorted(map(str, sets))
    assert (source.calls == [str(one) for one in sets]) is simulated


def test_sets_measured_before_the_source_failed_are_in_the_journal(tmp_path):
    class Failing(Counting):
        simulated = False

        def measure(self, sets):
            if len(self.calls) == 3:
                raise MeasurementError("the fourth failed")
            return super().measure(sets)

    source, path = Failing(), tmp_path / "m.jsonl"
    sets = [parse_set(f"G0->G0->G{i}") for i in range(1, 7)]
    with (
        Bench(
            source, journal=JournalFile(path, msgspec.structs.replace(HEADER, simulated=False))
        ) as journal,
        pytest.raises(MeasurementError),
    ):
        journal.measure(sets)
    assert list(map(str, read_journal(path).measurements)) == source.calls
    assert len(source.calls) == 3


def test_every_set_is_on_disk_as_soon_as_it_is_measured(tmp_path):
    path = tmp_path / "m.jsonl"
    journal = Bench(Counting(), journal=JournalFile(path, HEADER))
    journal.measure([ONE])
    assert list(read_journal(path).measurements) == [ONE]
    journal.close()


@pytest.mark.parametrize("change", [{"machine": "other"}, {"identity": "x"}, {"simulated": False}])
def test_a_journal_of_another_machine_is_refused_by_name(tmp_path, change):
    path = tmp_path / "m.jsonl"
    Bench(Counting(), journal=JournalFile(path, HEADER)).close()
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"belongs to machine toy\b.*use"):
        Bench(Counting(), journal=JournalFile(path, msgspec.structs.replace(HEADER, **change)))
    assert path.read_bytes() == before


def test_the_refusal_of_a_journal_names_what_differs_alone(tmp_path):
    path = tmp_path / "m.jsonl"
    old, new = (
        msgspec.structs.replace(HEADER, identity=f"GPUs a, b; driver 1; kernel {kernel}")
        for kernel in (5, 6)
    )
    Bench(Counting(), journal=JournalFile(path, old)).close()
    with pytest.raises(InputError) as refused:
        JournalFile(path, new)
    assert "(kernel 5), not to machine toy (kernel 6)" in refused.value.what
    assert "driver" not in refused.value.what


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    with Bench(Counting(), journal=JournalFile(path, HEADER)) as journal:
        journal.measure([ONE, TWO])
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], lines[1][:-5], lines[2], ""]))
    with pytest.raises(InputError, match=r"m\.jsonl:2: does not fit the measurement format"):
        read_journal(path)


def test_a_file_without_header_is_no_journal(tmp_path):
    (tmp_path / "m.jsonl").write_text("{}")
    with pytest.raises(InputError, match="has no header line"):
        read_journal(tmp_path / "m.jsonl")
