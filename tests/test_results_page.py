"""The page of results: generated from files, as committed, and closed to what is no result."""

import json
import re

import pytest

from scripts import results_page
from scripts.results_page import (
    IN_README,
    PAGE,
    README,
    RECORDED,
    front_row,
    page,
    read_result,
    readme,
    row,
)
from tccl_py.errors import InputError
from tccl_py.experiments.record import Verification
from tccl_py.files import decode_json, encode_json
from tccl_py.report.verification import report_verification

FOLDER = RECORDED
RECORDED = RECORDED / "h200x4-vm-no-p2p.json"


@pytest.fixture
def printed():
    """What `verify --json` prints of a recorded verification."""
    found = decode_json(RECORDED.read_text(), Verification, where="recorded")
    return json.loads(encode_json(report_verification(found)))


def test_the_page_is_as_the_script_writes_it():
    assert PAGE.read_text() == page()
    assert README.read_text() == readme()


def test_each_measured_figure_of_the_readme_is_in_a_recorded_file():
    prose = re.sub(r"^```.*?^```$", "", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    versions = r"(?:NCCL|Python|Apache)[ -][\d.]+(?: to [\d.]+)?"
    figures = re.findall(r"\d+\.\d+", re.sub(versions, "", prose))
    rows = [front_row(*each) for each in IN_README]
    assert figures == [figure for row in rows for figure in re.findall(r"\d+\.\d+", row)]
    assert len(figures) >= 4 * 5
    # The rows' own figures, from the files.
    raw = "".join((FOLDER / f"{name}.json").read_text() for name, _ in IN_README)
    recorded = [float(figure) for figure in re.findall(r"\d+\.\d+", raw)]
    for figure in figures:
        digits = len(figure.partition(".")[2])
        assert any(f"{value:.{digits}f}" == figure for value in recorded), figure


def test_a_sent_file_gives_the_row_of_the_recorded_one(printed, tmp_path):
    sent = tmp_path / "sent.json"
    sent.write_text(json.dumps(printed))
    assert read_result(sent) == read_result(RECORDED)
    cells = row(read_result(sent), RECORDED)
    assert "| 4x NVIDIA H200 |" in cells
    assert "**1.557** (1.546 to 1.568)" in cells
    assert "25.4 → 39.3" in cells


def test_files_are_added_below_docs_without_their_other_fields(printed, tmp_path, monkeypatch):
    sent, target = tmp_path / "My Box!.json", tmp_path / "page.md"
    target.write_text(PAGE.read_text())
    sent.write_text(json.dumps(printed))
    monkeypatch.setattr(results_page, "SENT", tmp_path / "results")
    monkeypatch.setattr(results_page, "PAGE", target)
    monkeypatch.setattr("sys.argv", ["results_page", str(sent)])
    results_page.main()
    kept = json.loads((tmp_path / "results" / "my-box.json").read_text())
    assert "settings" not in kept["arms"][0]
    assert "[my-box](results/my-box.json) |" in target.read_text()


def test_names_in_files_do_nothing_on_the_page(printed, tmp_path):
    printed["devices"] = ["<script>|[x](y)\x1b`"] * 4
    sent = tmp_path / "sent.json"
    sent.write_text(json.dumps(printed))
    cells = row(read_result(sent), RECORDED)
    assert "\\<script\\>\\|\\[x\\](y)" in cells
    assert "\x1b" not in cells


BAD = {
    "a dry run": {"backend": "host"},
    "no versions": {"versions": {}},
    "no devices": {"devices": []},
    "another collective": {"collective": "all_gather"},
    "no arms": {"arms": []},
    "an unknown winner": {"winner": "magic"},
    "no JSON object": None,
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_result_is_refused(case, printed, tmp_path):
    sent = tmp_path / "sent.json"
    sent.write_text("[]" if BAD[case] is None else json.dumps(printed | BAD[case]))
    with pytest.raises(InputError):
        read_result(sent)


def test_a_dry_run_is_refused_in_one_sentence_and_adds_nothing(
    printed, tmp_path, monkeypatch, capsys
):
    good, dry = tmp_path / "good.json", tmp_path / "dry.json"
    good.write_text(json.dumps(printed))
    dry.write_text(json.dumps(printed | BAD["a dry run"]))
    monkeypatch.setattr(results_page, "SENT", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["results_page", str(good), str(dry)])
    with pytest.raises(SystemExit) as ended:
        results_page.main()
    assert (ended.value.code, capsys.readouterr().err.count("\n")) == (2, 1)
    assert not results_page.SENT.exists()


def test_wrong_values_are_refused(printed, tmp_path):
    printed["arms"][1]["wrong"] = [{}]
    sent = tmp_path / "sent.json"
    sent.write_text(json.dumps(printed))
    with pytest.raises(InputError):
        read_result(sent)
