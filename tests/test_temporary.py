"""Folders of programs that were killed are taken away by the next one, and nobody else's."""

import errno
import os
import signal
import subprocess
import sys
import tempfile

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


def test_only_marked_folders_without_a_lock_are_taken_away(place):
    for name in ("target", "tccl-t-unmarked", "tccl-t-linked-marker", "tccl-t-dead", "unlike"):
        (place / name / "inner").mkdir(parents=True)
    for name in ("target", "tccl-t-dead", "unlike"):
        (place / name / MARKER).touch()
    (place / "tccl-t-linked-marker" / MARKER).symlink_to(place / "target" / MARKER)
    (place / "tccl-t-link").symlink_to(place / "target")
    with temporary_folder("tccl-t-") as living:
        kept = {path for path in place.iterdir() if path.name != "tccl-t-dead"}
        assert living in kept
        with temporary_folder("tccl-t-"):
            pass
        assert set(place.iterdir()) == kept


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
