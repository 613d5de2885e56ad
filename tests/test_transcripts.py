"""Each command prints what its transcript shows; scripts/record-transcripts writes them again."""

import os

import pytest

from tccl_py.cli.main import COMMANDS
from tests.transcripts import PAGES, folder, run_again


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_its_transcript_shows(name, monkeypatch):
    path = PAGES / f"{name}.txt"
    text = path.read_text()
    with folder() as place:
        again = run_again(text, place, monkeypatch)
    if os.environ.get("TCCL_RECORD"):
        path.write_text(again)
    assert again == path.read_text(), "scripts/record-transcripts writes it again"


def test_every_transcript_is_of_a_command_and_shows_bad_input():
    pages = {path.stem: path.read_text() for path in PAGES.iterdir()}
    assert pages.keys() == COMMANDS.keys()
    assert [name for name, text in pages.items() if "\n[exit 2]" not in text] == []
    assert [name for name, text in pages.items() if f"tccl {name}" not in text] == []
