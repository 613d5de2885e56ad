"""Ranks as processes, whoever runs them: their numbers, their causes, their answers."""

import functools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tccl_py.errors import InputError, MeasurementError
from tccl_py.rank_processes.forkserver import ForkServer
from tccl_py.rank_processes.tasks import (
    FOLDER,
    RankOutput,
    RanksError,
    Task,
    decode_results,
    run_tasks,
)
from tests.processes import alive
from tests.skips import needs

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def run():
    """Runs ranks, forks of one server."""
    with ForkServer() as server:
        yield functools.partial(run_ranks, server=server)


def run_ranks(
    folder,
    text,
    ranks,
    *,
    timeout=60.0,
    variables=None,
    listener=None,
    imports=("decimal", "no_such_module"),
    **more,
):
    """Run the ranks of one job, whose program is `text`."""
    (folder / "stand_in.py").write_text(text)
    task = Task(
        program="stand_in",
        spec="{}",
        ranks=ranks,
        environment={
            **os.environ,
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
            "NCCL_OWN": f"{FOLDER}/log-x",
            **(variables or {}),
        },
        timeout=timeout,
        files={"graph.xml": "<graphs/>"},
        imports=imports,
    )
    (left,) = run_tasks([task], listeners=[listener] if listener else (), **more)
    return left


ANSWERING = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1]).parent
(folder / f'result-{sys.argv[2]}.json').write_text(sys.argv[2])
open(os.environ["NCCL_OWN"], 'a').write((folder / 'graph.xml').read_text())
"""


def test_the_first_rank_inherits_where_all_meet(run, tmp_path):
    text = ANSWERING + (
        "import socket\nname = 'TCCL_RENDEZVOUS_DESCRIPTOR'\nsaid = os.environ.get(name, '0')\n"
        "if said != '0': said = socket.socket(fileno=int(said)).getsockname()[1]\n"
        "(folder / f'result-{sys.argv[2]}.json').write_text(str(said))"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = run(tmp_path, text, (0, 1), listener=listener)
        assert decode_results(left, (0, 1), int) == (listener.getsockname()[1], 0)


def test_torch_ranks_meet_below_a_secret_prefix_of_their_store(run, tmp_path):
    needs("torch")
    program = """
        import sys, torch.distributed as dist
        from pathlib import Path
        from tccl_py.rank_processes.rank import Rendezvous, join, write_result
        at, rank = Rendezvous(address="127.0.0.1", port={port}, prefix="secret"), int(sys.argv[2])
        ranks = join("gloo", at, rank=rank, world=2, local_rank=rank)
        ranks.maximum(0)
        names = dist.TCPStore(at.address, at.port, is_master=False).list_keys()
        write_result(Path(sys.argv[1]).parent, rank, sorted(names))
        ranks.maximum(0)
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        text = textwrap.dedent(program).replace("{port}", str(listener.getsockname()[1]))
        variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        left = run(tmp_path, text, (0, 1), listener=listener, variables=variables)
    names = decode_results(left, (0, 1), list[str])[0]
    assert names and all(name.startswith("secret/") for name in names)


def test_what_is_raised_meanwhile_ends_the_ranks(run, tmp_path):
    def leave():
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        run(tmp_path, "import time\ntime.sleep(600)", (0, 1), meanwhile=leave)


def test_the_rank_whose_last_words_name_a_cause_is_told(run, tmp_path):
    text = (
        "import sys\nlast = '[rank3]:[W1122 20:17:16 x.cpp:1575] Warning: WARNING: a group'\n"
        "said = {'2': 'goodbye', '3': f'ValueError: no   room\\nbye\\n{last}'}[sys.argv[2]]\n"
        "print(said)\nsys.exit(7)"
    )
    with pytest.raises(RanksError) as caught:
        run(tmp_path, text, (2, 3))
    error = caught.value
    assert (error.ranks, error.late) == ((3,), False)
    assert (error.what, error.said) == ("ended with code 7", "ValueError: no room")


def test_an_error_of_cuda_is_told_and_not_what_torch_adds(run, tmp_path):
    error = "torch.AcceleratorError: CUDA error: unspecified launch failure"
    added = "CUDA kernel errors might be asynchronously reported at some other API call"
    text = f"import sys\nprint({error!r})\nprint({added!r})\nsys.exit(1)"
    with pytest.raises(RanksError) as caught:
        run(tmp_path, text, (0,))
    assert caught.value.said == error


@pytest.mark.parametrize("words", ["", "Cuda failure 2 'out of memory'"])
def test_nccls_error_is_told_with_its_words_if_it_has_any(run, tmp_path, words):
    message = f"DistBackendError: x\nncclUnhandledCudaError: Call failed.\nLast error:\n{words}\n"
    with pytest.raises(RanksError) as caught:
        run(tmp_path, f"import sys\nprint({message!r})\nsys.exit(1)", (0,))
    assert caught.value.said == f"ncclUnhandledCudaError: Call failed. {words}".strip()


def test_without_a_cause_whoever_said_something_is_told(run, tmp_path):
    text = "import sys\nif sys.argv[2] == '1': print('goodbye')\nsys.exit(7)"
    with pytest.raises(RanksError, match=r"^rank 1: .*goodbye$"):
        run(tmp_path, text, (0, 1))


def test_ranks_that_are_late_are_all_named(run, tmp_path):
    text = "import sys, time\nif sys.argv[2] != '1': time.sleep(600)"
    with pytest.raises(RanksError) as caught:
        run(tmp_path, text, (0, 1, 2), timeout=1.0)
    # On a busy machine the one that ends may not have begun.
    assert {0, 2} <= set(caught.value.ranks)
    assert caught.value.late
    assert caught.value.what == "did not end within 1 s"


MAPPING = """
import mmap, os, sys, time
path = '/dev/shm/nccl-' + os.environ['NCCL_OWN_NAME'] + sys.argv[2]
file = open(path, 'w+b')
os.ftruncate(file.fileno(), 4096)
held = mmap.mmap(file.fileno(), 4096)
file.write(b'mapped'); file.flush()
if sys.argv[2] == '1':
    os.unlink(path)
    open(os.environ['NCCL_OWN_DONE'], 'w').close()
if sys.argv[2] == '2': sys.exit('2 fails')
time.sleep(600)
"""


@pytest.mark.parametrize("interrupted", [False, True])
def test_of_ranks_that_are_ended_no_shared_memory_of_nccl_stays(tmp_path, interrupted):
    name = f"{os.getpid()}x"
    other, *held = (Path(f"/dev/shm/nccl-{name}{rank}") for rank in ("other", 0, 3))
    other.write_bytes(bytes(8))
    done = tmp_path / "unlinked"
    variables = {"NCCL_OWN_NAME": name, "NCCL_OWN_DONE": str(done)}

    def meanwhile():
        there = done.exists() and all(path.exists() for path in held)
        if interrupted and there and all(b"mapped" in path.read_bytes() for path in held):
            raise KeyboardInterrupt

    ranks = (0, 1, 3) if interrupted else (0, 1, 2)
    try:
        with pytest.raises(KeyboardInterrupt if interrupted else RanksError):
            run_ranks(tmp_path, MAPPING, ranks, variables=variables, meanwhile=meanwhile)
        # That of others stays, and what a rank leaves that ended by itself.
        left = {path.name for path in Path("/dev/shm").glob(f"nccl-{name}*")}
        assert left == {other.name, *(f"nccl-{name}2" for _ in range(not interrupted))}
    finally:
        for path in Path("/dev/shm").glob(f"nccl-{name}*"):
            path.unlink()


def test_an_answer_that_is_none_is_told():
    with pytest.raises(InputError, match=r"^result of rank 5: does not"):
        decode_results(RankOutput(results=('"x"',), log=""), (5,), int)


def test_ranks_begin_as_programs_of_their_own_with_their_environment_alone(run, tmp_path):
    text = ANSWERING + (
        "import json, decimal\n"
        "spoilt = hasattr(decimal, 'spoilt') or 'SPOILT' in os.environ\n"
        "decimal.spoilt, os.environ['SPOILT'] = 1, '1'\n"
        "said = [__name__, spoilt, os.environ.get('ONLY', ''), os.getpgid(0) == os.getpid()]\n"
        "(folder / f'result-{sys.argv[2]}.json').write_text(json.dumps(said))"
    )
    for only in ("a", "b"):
        left = run(tmp_path, text, (0, 1), variables={"ONLY": only})
        assert decode_results(left, (0, 1), list) == tuple([["__main__", False, only, True]] * 2)


def test_forks_share_what_was_imported_until_the_environment_is_another(tmp_path):
    text = ANSWERING + (
        "import json\nsaid = [os.getppid(), 'decimal' in sys.modules]\n"
        "(folder / f'result-{sys.argv[2]}.json').write_text(json.dumps(said))"
    )
    with ForkServer() as server:
        parents = []
        for variables in ({}, {"NCCL_ALGO": "Ring"}, {"OMP_NUM_THREADS": "2"}):
            left = run_ranks(tmp_path, text, (0, 1), server=server, variables=variables)
            (one, had), other = decode_results(left, (0, 1), list)
            assert other == [one, True]
            assert had
            parents.append(one)
    # NCCL's variables are read by each rank; others may have been read by what was imported.
    assert parents[0] == parents[1] != parents[2]
    assert not any(Path(f"/proc/{one}").exists() for one in parents)


def test_after_their_fork_server_was_killed_ranks_end_and_the_next_ones_have_another(tmp_path):
    with ForkServer() as server:
        killing = "import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)"
        with pytest.raises(MeasurementError, match="has ended"):
            run_ranks(tmp_path, killing, (0,), server=server)
        left = run_ranks(tmp_path, ANSWERING, (0,), server=server)
        assert decode_results(left, (0,), int) == (0,)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_who_started_forks(tmp_path, number):
    text = (
        "import os, pathlib, sys\nfile = pathlib.Path(os.environ['PIDS'], sys.argv[2])\n"
        "file.write_text(f'{os.getpid()} {os.getppid()}')\n"
        "import time\ntime.sleep(600)"
    )
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.test_rank_processes import *\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with ForkServer() as server:\n"
        f"    run_ranks(folder, {text!r}, (0, 1), server=server, variables={{'PIDS': str(folder)}})"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 60
    files = [tmp_path / "0", tmp_path / "1"]
    while time.monotonic() < until and not all(one.exists() and one.read_text() for one in files):
        time.sleep(0.05)
    pids = {int(pid) for one in files for pid in one.read_text().split()}
    assert len(pids) == 3
    started.send_signal(number)
    assert started.wait(60) != 0
    while time.monotonic() < until and any(map(alive, pids)):
        time.sleep(0.05)
    assert not any(map(alive, pids))
