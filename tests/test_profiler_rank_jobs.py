"""Jobs of rank processes over hosts that are agents on this machine."""

import socket
import time

import pytest

from tccl_profiler.cluster.agent import Agent
from tccl_profiler.cluster.agents import RankJobs
from tccl_profiler.protocol import Connection, call_of
from tccl_py.errors import InputError
from tccl_py.rank_processes.tasks import Task, decode_results
from tests.processes import alive
from tests.profiler_clusters import agents_in_processes

HOSTS = ("north", "south")
PROGRAM = """
import json, os, pathlib, socket, sys, time
order, rank = json.loads(pathlib.Path(sys.argv[1]).read_text()), int(sys.argv[2])
pathlib.Path(os.environ["PIDS"], f"pid-{rank}").write_text(str(os.getpid()))
word = order["words"][rank]
if word == "fail":
    sys.exit("ValueError: no room")
if word == "hang":
    time.sleep(600)
if rank == 0:
    with socket.socket(fileno=int(os.environ["TCCL_RENDEZVOUS_DESCRIPTOR"])) as meeting:
        for _ in order["words"][1:]:
            meeting.accept()[0].close()
else:
    assert "TCCL_RENDEZVOUS_DESCRIPTOR" not in os.environ
    socket.create_connection((order["address"], order["port"]), 5).close()
pathlib.Path(sys.argv[1]).with_name(f"result-{rank}.json").write_text(json.dumps(rank))
pathlib.Path(sys.argv[1]).with_name("log-1").write_text(os.environ["WHO"])
"""


@pytest.fixture
def jobs(tmp_path):
    """The hosts, and a function that runs a job of ranks 0 and 1 on one, 2 and 3 on the other."""
    (tmp_path / "stand_in.py").write_text(PROGRAM)
    with agents_in_processes(HOSTS) as job:
        rank_jobs = RankJobs(job)

        def run(words, timeout=60.0):
            surroundings = rank_jobs.surroundings()
            meeting = rank_jobs.rendezvous("north", 1)[0]
            order = (
                f'{{"words": {words.split()!r}, "address": {meeting.address!r}, '
                f'"port": {meeting.port}}}'
            ).replace("'", '"')
            tasks = {
                host: Task(
                    program="stand_in",
                    spec=order,
                    ranks=ranks,
                    environment={
                        **surroundings[host],
                        "PYTHONPATH": f"{tmp_path}:{surroundings[host]['PYTHONPATH']}",
                        "PIDS": str(tmp_path),
                        "WHO": host,
                    },
                    timeout=timeout,
                )
                for host, ranks in (("north", (0, 1)), ("south", (2, 3)))
            }
            left = rank_jobs.run({host: [task] for host, task in tasks.items()})
            return {host: one for host, (one,) in left.items()}

        yield run


def gone(folder):
    """Whether all ranks are gone, at once or soon."""
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    for _ in range(400):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


def test_ranks_of_two_hosts_meet_and_answer_twice_in_a_row(jobs):
    for _ in range(2):
        left = jobs("ok ok ok ok")
        assert decode_results(left["north"], (0, 1), int) == (0, 1)
        assert decode_results(left["south"], (2, 3), int) == (2, 3)
        assert (left["north"].log, left["south"].log) == ("north", "south")


def test_ranks_meet_at_the_address_alone_by_which_the_hosts_of_the_job_are_joined():
    with socket.create_server(("127.0.0.5", 0)) as server, agents_in_processes(HOSTS) as job:
        caller = socket.create_connection(server.getsockname(), source_address=("127.0.0.6", 0))
        own, theirs = (Connection(end, peer="") for end in (server.accept()[0], caller))
        assert (own.ends, theirs.ends) == (("127.0.0.5", "127.0.0.6"), ("127.0.0.6", "127.0.0.5"))
        job.connections["east"] = own
        one, other = RankJobs(job).rendezvous("north", 2)
        for meeting in (one, other):
            assert meeting.address == "127.0.0.5"
            socket.create_connection((meeting.address, meeting.port), 5).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", meeting.port), 5)
        assert one.prefix != other.prefix and len(one.prefix) >= 32


def test_a_host_without_what_ranks_import_is_named():
    with agents_in_processes(HOSTS) as job:
        rank_jobs = RankJobs(job)
        with pytest.raises(InputError, match=r"^host north: lacks"):
            rank_jobs.surroundings(modules=("json", "no_such"))
        assert set(rank_jobs.surroundings(modules=("json",))) == set(HOSTS)


def test_agents_that_lose_their_controller_leave_no_rank(tmp_path):
    (tmp_path / "stand_in.py").write_text(PROGRAM)
    with agents_in_processes(HOSTS) as job:
        surroundings = RankJobs(job).surroundings()["south"]
        task = Task(
            program="stand_in",
            spec='{"words": ["hang"]}',
            ranks=(0,),
            environment={
                **surroundings,
                "PYTHONPATH": f"{tmp_path}:{surroundings['PYTHONPATH']}",
                "PIDS": str(tmp_path),
            },
            timeout=600.0,
        )
        job.agent("south").tell(99, call_of(Agent.run_ranks, ((task,),)))
        for _ in range(600):
            if list(tmp_path.glob("pid-*")):
                break
            time.sleep(0.05)
        assert alive(int((tmp_path / "pid-0").read_text()))
        job.agent("south").close()
        assert gone(tmp_path)
