"""The journal: runs that resume; damaged, torn and used files; and runs that are killed."""

import json
import math
import os
import subprocess
import sys
import time

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tccl_py.errors import InputError, MeasurementError
from tccl_py.files import encode_line
from tccl_py.model.measurement import JournalHeader, Measurement
from tccl_py.model.transfer import parse_set
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import JournalFile, read_journal
from tccl_py.sources.opening import open_source
from tests.commands import tccl

HEADER = JournalHeader(machine="toy", identity="model 1", simulated=True)
SETS = [parse_set("G0->G0->G1 G2->G2->G3"), parse_set("G1->G1->G0")]
ONE, TWO = parse_set("G0->G0->G1"), parse_set("G1->G1->G0")
COMMAND = ("measure", "G0->G0->G1", "--simulate", "h200x4-vm", "--journal")


class Source:
    simulated = True

    def __init__(self, **fields):
        self.calls, self.fields = [], fields

    def measure(self, sets):
        self.calls += [str(one) for one in sets]
        rows = [((1.5, 2.0),) * len(one) for one in sets]
        fields = {"simulated": self.simulated, **self.fields}
        return [
            Measurement(**{"transfers": s, "samples_gbps": r, **fields})
            for s, r in zip(sets, rows, strict=True)
        ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.jsonl"


def measured(path):
    """All sets, from the journal or by a new source; what the journal said, and what was asked."""
    source = Source()
    with Bench(source, journal=JournalFile(path, HEADER)) as journal:
        return journal.measure(SETS), journal.notices, source.calls


def test_a_resumed_run_measures_nothing_twice(path):
    source = Source()
    with Bench(source, journal=JournalFile(path, HEADER)) as journal:
        first = journal.measure([ONE])
    with Bench(source, journal=JournalFile(path, HEADER)) as journal:
        assert journal.measure([ONE, TWO])[0] == first[0]
        assert journal.sets_remembered == 1
        assert source.calls == [str(ONE), str(TWO)]


def test_a_journal_that_can_only_be_read_answers_for_its_own_machine_alone(path, monkeypatch):
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
    source = Source()
    source.simulated = simulated
    sets = [parse_set(f"G0->G0->G{i + 1}") for i in range(14)]
    answers = Bench(source).measure(sets)
    assert [one.transfers for one in answers] == sets
    assert sorted(source.calls) == sorted(map(str, sets))
    assert (source.calls == [str(one) for one in sets]) is simulated


def test_sets_measured_before_the_source_failed_are_in_the_journal(path):
    class Failing(Source):
        simulated = False

        def measure(self, sets):
            if len(self.calls) == 3:
                raise MeasurementError("the fourth failed")
            return super().measure(sets)

    source = Failing()
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


@pytest.mark.parametrize("change", [{"machine": "other"}, {"identity": "x"}, {"simulated": False}])
def test_a_journal_of_another_machine_is_refused_by_name(path, change):
    Bench(Source(), journal=JournalFile(path, HEADER)).close()
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"belongs to machine toy\b.*use"):
        Bench(Source(), journal=JournalFile(path, msgspec.structs.replace(HEADER, **change)))
    assert path.read_bytes() == before


def test_the_refusal_of_a_journal_names_what_differs_alone(path):
    old, new = (
        msgspec.structs.replace(HEADER, identity=f"GPUs a, b; driver 1; kernel {kernel}")
        for kernel in (5, 6)
    )
    Bench(Source(), journal=JournalFile(path, old)).close()
    with pytest.raises(InputError) as refused:
        JournalFile(path, new)
    assert "(kernel 5), not to machine toy (kernel 6)" in refused.value.what
    assert "driver" not in refused.value.what


@pytest.mark.parametrize("line", [b"{}", b"\xff", b"", b'{"transfers": "G0'])
def test_a_damaged_last_line_is_named_and_the_journal_goes_on_without_it(path, line):
    measured(path)
    whole = path.read_bytes()
    path.write_bytes(whole + line + b"\n")
    with pytest.raises(InputError) as caught:
        read_journal(path)
    assert caught.value.where == f"{path}:4"
    assert caught.value.right.startswith("delete this line")
    path.write_bytes(whole)
    assert measured(path)[2] == []


def corrupted(path, line, field, value):
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[line][field] = value
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


REFUSED = [
    ("samples_gbps", [[-5.0], [1.0]], "has a rate of -5 GB/s; delete this line"),
    ("samples_gbps", [[1.0], [1e300]], "has a rate of 1e+300 GB/s"),
    ("samples_gbps", [[1.0], [math.nan]], "does not fit the measurement format"),
    ("samples_gbps", [[1.0], [math.inf]], "does not fit the measurement format"),
    ("samples_gbps", [], "has rates of 0 flows, but its set has 2"),
    ("samples_gbps", [[1.0]], "has rates of 1 flows, but its set has 2"),
    ("samples_gbps", [[], []], "does not have a rate of every flow in every repeat"),
    ("samples_gbps", [[1.0], [1.0, 2.0]], "does not have a rate of every flow in every repeat"),
    ("transfers", "", "does not fit the measurement format (transfer set is empty"),
    ("transfers", "G0->G1", "does not fit the measurement format (flow 'G0->G1' has 2 places"),
    ("transfers", "G2->G2->G3 G0->G0->G1", "does not fit the measurement format"),
    ("transfers", "G0->G0->G1  G2->G2->G3", "does not fit the measurement format"),
    ("simulated", False, "contradicts line 1 on whether it is simulated"),
    ("overlap", 1.5, "has overlap 1.5"),
    ("skew_us", -1.0, "has skew_us -1"),
    ("outliers", [2], "has an outlier that is none of its 2 repeats"),
    ("colour", "red", "does not fit the measurement format"),
]


@pytest.mark.parametrize("field, value, sentence", REFUSED)
def test_figures_that_cannot_be_are_refused_by_file_and_line(field, value, sentence, path):
    measured(path)
    corrupted(path, 1, field, value)
    before = path.read_bytes()
    with pytest.raises(InputError) as refusal:
        measured(path)
    assert str(refusal.value).startswith(f"{path}:2: {sentence}")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "field, value",
    [
        ("samples_gbps", [[0.0], [0]]),
        ("samples_gbps", [[1.0, 2.0], [1.0, 0.0]]),
        ("overlap", 0.0),
        ("overlap", 0.899),
    ],
)
def test_a_line_without_a_rate_or_of_flows_that_did_not_run_together_is_refused(field, value, path):
    measured(path)
    corrupted(path, 1, field, value)
    with pytest.raises(InputError, match=f"{path}:2: has "):
        read_journal(path)


@pytest.mark.parametrize(
    "text, more",
    [
        ("G0->D0->G1 G0->G0->C0", {}),
        ("h0.G0->h0.D0->h0.G1 h0.G0->h0.G0->h0.C0", {}),
        ("G0->G0->C0 G1->G1->C0", {"overlap_at_least": True}),
    ],
)
def test_an_overlap_that_the_clock_cannot_show_is_kept_as_a_bound(text, more, path):
    one = parse_set(text)
    for asked in ([text], []):
        source = Source(overlap=0.46, **more)
        with Bench(source, journal=JournalFile(path, HEADER)) as journal:
            assert journal.measure([one])[0].overlap == 0.46
        assert source.calls == asked


def test_no_source_can_hand_on_a_rate_of_0():
    with pytest.raises(MeasurementError, match=r"^G0->G0->G1: its measurement has a rate"):
        Measurement(transfers=parse_set("G0->G0->G1"), samples_gbps=((1.0, 0.0),), simulated=False)


def test_flows_that_ran_apart_are_refused_and_not_kept(path):
    with (
        Bench(Source(overlap=0.5), journal=JournalFile(path, HEADER)) as journal,
        pytest.raises(MeasurementError, match=r"^G1->G1->G0: its flows ran together"),
    ):
        journal.measure(SETS[1:])
    assert not read_journal(path).measurements


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=6,
) | st.lists(st.lists(st.floats(), max_size=3), max_size=3)
FIELDS = [*Measurement.__struct_fields__, *JournalHeader.__struct_fields__, "colour"]


@given(line=st.integers(0, 2), field=st.sampled_from(FIELDS), value=JSON)
@example(line=1, field="samples_gbps", value=[[1e6], [1e-300]])
@example(line=2, field="transfers", value="G0->G0->G1")
def test_any_corrupted_field_is_refused_or_harmless(tmp_path_factory, line, field, value):
    path = tmp_path_factory.mktemp("journal") / "m.jsonl"
    measured(path)
    corrupted(path, line, field, value)
    try:
        answers, _, _ = measured(path)
    except InputError as refusal:
        assert str(refusal).startswith(str(path))
        return
    assert [one.transfers for one in answers] == list(SETS)
    for one in answers:
        figures = (*one.gbps, one.total_gbps, one.rate_gbps, one.relative_error)
        assert all(math.isfinite(figure) and figure >= 0 for figure in figures)


@given(data=st.binary(max_size=40), at=st.integers(0, 400))
def test_any_corrupted_bytes_are_refused_or_harmless(tmp_path_factory, data, at):
    path = tmp_path_factory.mktemp("journal") / "m.jsonl"
    measured(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + data + whole[at + len(data) :])
    try:
        answers, _, _ = measured(path)
    except InputError as refusal:
        assert str(refusal).startswith(str(path))
    else:
        assert all(math.isfinite(rate) for one in answers for rate in one.gbps)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_what_could_not_be_read_back_is_not_written(rate, path):
    with (
        Bench(Source(samples_gbps=((rate,), (1.0,))), journal=JournalFile(path, HEADER)) as journal,
        pytest.raises(MeasurementError, match=r"^G0->G0->G1 G2->G2->G3: its measurement has a r"),
    ):
        journal.measure(SETS[:1])
    assert not read_journal(path).measurements


def test_a_file_torn_anywhere_is_gone_on_from(path):
    measured(path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        kept = sum(length >= len(b"".join(lines[: count + 1])) for count in range(1, len(lines)))
        torn = length - len(whole[:length].rpartition(b"\n")[0]) - (length >= len(lines[0]))
        _, notices, calls = measured(path)
        assert len(notices) == (torn > 0)
        assert all(f"line of {torn} characters" in notice for notice in notices)
        assert len(calls) == len(SETS) - kept
        assert path.read_bytes() == whole


def test_a_line_torn_inside_a_character_is_dropped_with_a_notice(path):
    measured(path)
    with path.open("ab") as file:
        file.write('{"transfers":"größe'.encode()[:-2])
    _, (notice,), asked = measured(path)
    assert notice.startswith(f"{path}: ")
    assert "18 characters" in notice
    assert asked == []


def test_a_whole_line_that_is_not_utf_8_is_named(path):
    measured(path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"\xff", *lines[1:]]))
    with pytest.raises(InputError, match=r"m\.jsonl:2: is not UTF-8 text"):
        measured(path)


@pytest.mark.parametrize("text", ["mine", '{"name":"box"}', "{}"])
def test_a_file_without_a_newline_that_begins_no_header_is_left_alone(text, path):
    path.write_text(text)
    with pytest.raises(InputError, match=r"has no header line"):
        measured(path)
    assert path.read_text() == text


def test_a_pipe_is_no_journal(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "measurements.jsonl")
    plan = ("plan", "--simulate", "h200x4-vm", "--force", str(tmp_path))
    for arguments, name in (
        ((*COMMAND, str(tmp_path / "pipe")), "pipe"),
        (plan, "measurements.jsonl"),
    ):
        result = tccl(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{tmp_path / name}: is not a regular" in result.stderr


def test_a_journal_in_use_is_refused_and_stays_as_it_is(path):
    with Bench(Source(), journal=JournalFile(path, HEADER)) as journal:
        journal.measure(SETS)
        before = path.read_bytes()
        result = tccl(*COMMAND, str(path))
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{path}: is in use" in result.stderr
        assert path.read_bytes() == before
    assert measured(path)[2] == []


def test_a_refused_journal_is_not_held(path):
    Bench(
        Source(), journal=JournalFile(path, JournalHeader(machine="x", identity="", simulated=True))
    ).close()
    for _ in range(2):
        with pytest.raises(InputError, match="belongs to machine x"):
            measured(path)


def test_a_journal_where_files_have_no_locks_is_used_all_the_same(path, monkeypatch):
    def unable(descriptor, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", unable)
    assert measured(path)[2] == measured(path)[2] + [str(one) for one in SETS]


LINES = 60_000
READING = """
import resource, sys
from pathlib import Path
from tests.effort import calls_at_most
from tccl_py.sources.journal import JournalFile
from tccl_py.model.measurement import JournalHeader
from tccl_py.sources.bench import Bench
from tccl_py.model.transfer import parse_set

resource.setrlimit(resource.RLIMIT_AS, (1_200_000 << 10, resource.RLIM_INFINITY))
header = JournalHeader(machine="toy", identity="model 1", simulated=True)
most, file, *texts = sys.argv[1:]
with calls_at_most(int(most)):
    journal = JournalFile(Path(file), header)
with Bench(journal=journal) as journal:
    for text in texts:
        (answer,) = journal.measure([parse_set(text)])
        assert str(answer.transfers) == text
# What getrusage says counts the parent's memory at the fork as well.
(peak,) = [one for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one]
print(int(peak.split()[1]) << 10)
"""


@pytest.mark.parametrize("text", ["G0->G0->G1", "G30000->G30000->G{}{{blocks={}}}"])
def test_a_journal_of_many_lines_is_read_with_few_calls(text, path):
    """The same set, or different ones, which takes longer: each set is parsed once."""
    texts = [text.format(number % 30_000, number // 30_000 + 1) for number in range(LINES)]
    one = Measurement(
        transfers=parse_set("G0->G0->G1"), samples_gbps=((1.5, 2.0, 1.75),), simulated=True
    )
    line = encode_line(one).decode().strip()
    lines = [line.replace("G0->G0->G1", name) for name in texts]
    path.write_text("\n".join([msgspec.json.encode(HEADER).decode(), *lines, ""]))
    command = [sys.executable, "-c", READING, str(200 * LINES), str(path), texts[0], texts[-1]]
    child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    used_bytes = int(child.stdout)
    assert used_bytes < (100 << 20) + 2_000 * LINES


MANY = [parse_set(f"G0->G0->G{index}") for index in range(1, 61)]
SLOW = """
import sys, time
from pathlib import Path
from tests.test_journal import HEADER, MANY, JournalFile, Bench, Source

class Slow(Source):
    def measure(self, sets):
        with open(sys.argv[2], "a") as asked:
            asked.write(f"{sets[0]}\\n")
        time.sleep(0.02)
        return super().measure(sets)

with Bench(Slow(), journal=JournalFile(Path(sys.argv[1]), HEADER)) as journal:
    journal.measure(MANY)
"""


def test_a_killed_run_loses_at_most_the_set_in_flight(path, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", SLOW, str(path), str(tmp_path / "asked")])
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") > 8):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.kill()
    child.wait(timeout=60)
    asked = (tmp_path / "asked").read_text().splitlines()
    kept = list(map(str, read_journal(path).measurements))
    assert kept == asked[: len(kept)]
    assert len(asked) - len(kept) <= 1
    source = Source()
    with Bench(source, journal=JournalFile(path, HEADER)) as journal:
        journal.measure(MANY)
    assert 8 <= len(kept) < len(MANY)
    assert source.calls == [str(one) for one in MANY[len(kept) :]]
    assert all(len(found) == 1 for found in read_journal(path).measurements.values())
