"""Child processes: no file of the current directory runs in them, and they end with their parent.

What is started is found by a variable of its environment, which everything inherits.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tccl_py.children import child_command, child_environment, search_path
from tests.skips import needs

ROOT = Path(__file__).resolve().parents[1]
MARK = "TCCL_TEST_FAMILY"
STANDARD = """
    ast bisect calendar contextlib copy csv ctypes dataclasses datetime decimal email enum fcntl
    functools glob hashlib heapq inspect json logging math mmap multiprocessing operator pathlib
    platform queue random re resource runpy secrets select selectors shutil signal socket stat
    string struct subprocess tempfile threading time traceback types typing uuid warnings
""".split()  # noqa: SIM905 (one name a line is long)
OTHERS = """
    cupy mpi4py msgspec numpy pynvml rich scipy sitecustomize tccl_profiler tccl_py torch typer
    usercustomize yaml
""".split()  # noqa: SIM905
SET = "G0->G0->C0->G1->G1{blocks=1,fifo=256K}"
MEASURE = ("measure", "--backend", "host", "--devices", "2", SET)


def console(*words):
    """The command line of the `tccl` command as it is installed."""
    script = Path(sys.executable).with_name("tccl")
    if not script.exists():
        pytest.skip("needs the tccl command beside this Python")
    return [str(script), *map(str, words)]


@pytest.fixture
def trap(tmp_path):
    """A directory of modules that say when they are imported, and what has been said."""
    folder, said = tmp_path / "trap", tmp_path / "said"
    folder.mkdir()
    said.mkdir()
    for name in (*STANDARD, *OTHERS):
        text = f"open({str(said / name)!r}, 'w').close()\nraise SystemExit('{name} was imported')\n"
        (folder / f"{name}.py").write_text(text)
    return folder, said


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan of this host's memory."""
    folder = tmp_path_factory.mktemp("planned") / "p"
    subprocess.run(
        console("plan", folder, "--simulate", "h200x4-vm", "--gpus", "0,1", "--max-sets", 3),
        check=True,
        capture_output=True,
        timeout=120,
    )
    return folder


GOES_ON = {
    "plan": "out/measurements.jsonl",
    "verify": "tccl-ranks-*/*/result-*",
}
"""Files that are there when a command has children that have imported all; it is ended then."""


@pytest.mark.parametrize(
    "words",
    [
        ("doctor",),
        ("env", "PLAN"),
        MEASURE,
        ("plan", "OUT", "--backend", "host", "--gpus", "0,1"),
        ("verify", "PLAN", "--backend", "host", "--sizes", "4K", "--no-checks"),
    ],
    ids=lambda words: words[0],
)
def test_no_file_of_the_current_directory_runs(trap, planned, tmp_path, words):
    folder, said = trap
    if words[0] == "verify":
        needs("torch")
    started = subprocess.Popen(
        console(*({"PLAN": planned, "OUT": tmp_path / "out"}.get(one, one) for one in words)),
        cwd=folder,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until, there = time.monotonic() + 100, GOES_ON.get(words[0], "none")
    while started.poll() is None and time.monotonic() < until:
        if any(one.stat().st_size for one in tmp_path.glob(there)):
            started.send_signal(signal.SIGINT)
            break
        time.sleep(0.02)
    output, _ = started.communicate(timeout=60)
    assert "was imported" not in output
    assert list(said.iterdir()) == []
    assert started.returncode in (0, 1, 130), output


@pytest.mark.parametrize("paths", ["", ":{}", "{}:", "{}::{}"])
def test_no_child_imports_from_the_current_directory(trap, tmp_path, paths):
    folder, said = trap
    (tmp_path / "found.py").write_text("")
    (tmp_path / "program.py").write_text(
        f"import sys\nimport found\nimport {', '.join(STANDARD)}\nprint(sys.argv[1:], __name__)\n"
    )
    entries = paths.format(*[tmp_path] * 2) or str(tmp_path)
    done = subprocess.run(
        child_command("program", "a", "b"),
        env=child_environment({**os.environ, "PYTHONPATH": entries}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("['a', 'b'] __main__\n", "")
    assert list(said.iterdir()) == []


def test_search_paths_lose_empty_entries_and_nothing_else():
    variables = {"PATH": ":/bin:", "LD_LIBRARY_PATH": "/x::.", "PYTHONPATH": "", "OTHER": ":a:"}
    assert child_environment(variables) == {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/x:.",
        "PYTHONPATH": "",
        "OTHER": ":a:",
    }


def test_the_current_directory_stays_on_the_path_only_where_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/x"])
    for named, found in (("", ["/x"]), (":/y", ["/x"]), (".", [str(tmp_path), "/x"])):
        monkeypatch.setenv("PYTHONPATH", named)
        assert search_path() == found
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    monkeypatch.chdir(ROOT)
    assert search_path() == [str(ROOT)]


# The end of the parent


def family(mark):
    """The processes that have the mark in their environment, but for zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                f"{MARK}={mark}".encode() in (path / "environ").read_bytes()
                and (path / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            ):
                found.append(int(path.name))
    return found


def ended(mark, within_s=5.0):
    """The processes that are left after some time."""
    until = time.monotonic() + within_s
    while (left := family(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


@pytest.fixture
def slow(tmp_path):
    """A folder with a torch that takes long to import, and keeps the interpreter's lock."""
    package = tmp_path / "slow" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import ctypes\nctypes.PyDLL(None).sleep(60)\n"  # PyDLL keeps the lock
    )
    return package.parent


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    ("words", "members"),
    [(MEASURE, 1), (MEASURE, 2), (MEASURE, 3), (("verify", "PLAN", "--backend", "host"), 2)],
)
def test_nothing_is_left_5_s_after_a_command_was_ended(planned, slow, words, members, number):
    """At its beginning, and when it has started others; those of verify hang in an import."""
    mark = uuid.uuid4().hex
    words = [str(planned) if one == "PLAN" else one for one in words]
    started = subprocess.Popen(
        console(*words, *(("--target", "1e-4") if words[0] == "measure" else ())),
        env={**os.environ, MARK: mark, "PYTHONPATH": str(slow), "PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.DEVNULL,
        stderr=(slow / "errors").open("wb"),
    )
    until = time.monotonic() + 60
    while len(family(mark)) < members and time.monotonic() < until:
        time.sleep(0.02)
    if len(family(mark)) < members:
        started.send_signal(signal.SIGABRT)  # Python's handler prints where each thread is
        started.wait(20)
        pytest.fail(f"it has started too few: {(slow / 'errors').read_text()}")
    started.send_signal(number)
    try:
        assert ended(mark) == []
    finally:
        started.kill()
        started.wait()


def test_a_child_ends_with_its_parent_while_it_imports_and_so_do_its_own(tmp_path):
    (tmp_path / "grandchild.py").write_text("import ctypes\nctypes.PyDLL(None).sleep(60)")
    (tmp_path / "child.py").write_text(
        "import subprocess\nfrom tccl_py.children import child_command\n"
        "subprocess.run(child_command('grandchild'))"
    )
    program = (
        "import subprocess\nfrom tccl_py.children import child_command\n"
        "subprocess.run(child_command('child'))"
    )
    mark = uuid.uuid4().hex
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    started = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, MARK: mark, "PYTHONPATH": paths}
    )
    until = time.monotonic() + 60
    while len(family(mark)) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    started.kill()
    started.wait()
    assert ended(mark) == []


def test_a_child_whose_parent_is_gone_already_does_not_begin(tmp_path):
    (tmp_path / "program.py").write_text("print('began')")
    command = child_command("program")
    command[2] = str(os.getppid())
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, b"")


def test_a_child_outlives_the_thread_that_started_it(tmp_path):
    (tmp_path / "program.py").write_text("import time\ntime.sleep(0.5)\nprint('lived')")
    program = (
        "import subprocess, threading\nfrom tccl_py.children import child_command\n"
        "def start(): subprocess.Popen(child_command('program'))\n"
        "thread = threading.Thread(target=start)\nthread.start()\nthread.join()\n"
        "import os\nos.wait()"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "lived\n"
