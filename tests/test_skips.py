"""A skip that hides a failure fails: the reasons of tests/skips.py are all there are."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("other work has taken the cores", 0),
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
