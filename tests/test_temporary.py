"""Folders of programs that were killed are taken away by the next one, and nobody else's."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from tccl_py.errors import InputError
from tccl_py.files import temporary_folder

MARKER = ".tccl-temporary"
HOLDING = (
    "import sys, time\nfrom tccl_py.files import temporary_folder\n"
    "with temporary_folder('tccl-t-') as folder:\n"
    "    (folder / 'file').write_text('x')\n    print(folder, flush=True)\n    time.sleep(600)\n"
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where temporary folders lie."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_gone_with_its_block(place):
    with pytest.raises(KeyError), temporary_folder("tccl-t-") as folder:
        assert folder.parent == place
        raise KeyError
    assert list(place.iterdir()) == []


def test_what_a_killed_program_left_is_taken_away_and_what_a_living_one_has_is_not(place):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDING],
            env={**os.environ, "TMPDIR": str(place), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    killed, living = (place / one.stdout.readline().strip() for one in started)
    started[0].send_signal(signal.SIGKILL)
    started[0].wait(60)
    with temporary_folder("tccl-t-"):
        assert (killed.exists(), (living / "file").exists()) == (False, True)
    started[1].kill()
    started[1].wait(60)


def marker_of(folder, **changed):
    """The marker that a folder of a program that is gone would have."""
    with temporary_folder("tccl-other-") as living:
        found = json.loads((living / MARKER).read_text())
    text = json.dumps({**found, "started": found["started"] + 1, **changed})
    (folder / MARKER).write_text(text)


def test_only_what_carries_a_dead_programs_marker_is_taken_away(place):
    hour_ago = (time.time() - 3600,) * 2
    (place / "target").mkdir()
    marker_of(place / "target")
    folders = {
        name: place / f"tccl-t-{name}"
        for name in ("unmarked", "words", "empty", "other-host", "living", "linked-marker", "dead")
    }
    for folder in folders.values():
        folder.mkdir()
    (folders["words"] / MARKER).write_text("mine")
    (folders["empty"] / MARKER).write_bytes(b"\xff" * 9000)
    marker_of(folders["other-host"], host="elsewhere")
    with temporary_folder("tccl-other-") as living:
        shutil.copy(living / MARKER, folders["living"])
    (folders["linked-marker"] / MARKER).symlink_to(place / "target" / MARKER)
    marker_of(folders["dead"])
    (place / "tccl-t-link").symlink_to(place / "target")
    (place / "tccl-t-file").write_text("x")
    before = set(place.iterdir())
    for path in before:
        os.utime(path, hour_ago, follow_symlinks=False)
    with temporary_folder("tccl-t-"):
        pass
    assert set(place.iterdir()) == before - {folders["dead"]}
    assert (place / "target" / MARKER).exists()


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "temporary folder {}: failed (No space"),
        (errno.EMFILE, "open files: the limit is "),
    ],
)
def test_what_the_system_refuses_is_named(place, number, sentence):
    with pytest.raises(InputError) as caught, temporary_folder("tccl-t-"):
        raise OSError(number, os.strerror(number))
    assert str(caught.value).startswith(sentence.format(place))
    assert list(place.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(place, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(place / "none"))
    with (
        pytest.raises(InputError, match=r"^temporary folder .*/none: "),
        temporary_folder("tccl-t-"),
    ):
        pass
