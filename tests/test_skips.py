"""A skip that hides a failure fails: the reasons of tests/skips.py are all there are."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import skips

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("needs idle cores: a process gets 20 % of one", 0),
        ("cc fails: decide.c:1: error", 1),
        ("needs a C compiler, a fast machine", 1),
        ("needs unshare", 1),
    ],
)
def test_a_skip_for_a_reason_that_is_not_listed_or_not_true_fails(tmp_path, reason, code):
    (tmp_path / "unshare").touch(mode=0o755)
    file = tmp_path / "test_one.py"
    file.write_text(f"import pytest\ndef test_one():\n    pytest.skip({reason!r})\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(file)],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout


@pytest.mark.parametrize(("share", "raised"), [(0.2, pytest.skip.Exception), (1.0, AssertionError)])
def test_what_is_measured_may_fail_on_idle_cores_and_is_skipped_by_name_on_busy_ones(
    monkeypatch, share, raised
):
    monkeypatch.setattr(skips, "share_of_a_core", lambda: share)
    with pytest.raises(raised) as caught, skips.unless_busy():
        raise AssertionError
    assert raised is AssertionError or skips.is_listed(str(caught.value))


def test_workers_that_are_more_than_cores_may_fail_and_are_skipped_by_name(monkeypatch):
    monkeypatch.setattr(skips, "share_of_a_core", lambda: 1.0)
    with pytest.raises(pytest.skip.Exception) as caught, skips.unless_busy(workers=10**6):
        raise AssertionError
    assert skips.is_listed(str(caught.value))


def test_a_process_that_is_alone_on_its_core_gets_a_share_of_it():
    assert 0 < skips.share_of_a_core() < 1.1
