"""The order of hosts as files for launchers: each is read back, and two launchers read some too."""

import json
import os
import re
import subprocess

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.plan.host_files import (
    HOSTS,
    MPICH_MACHINEFILE,
    OPEN_MPI_HOSTFILE,
    OPEN_MPI_RANKFILE,
    RANK_MAP,
    SLURM_HOSTFILE,
    host_order_files,
    launch_notes,
)
from tccl_py.readers.hosts import HostSlots, parse_host_list
from tests.skips import needs

ORDER = (("gpu3", (0, 1)), ("gpu1", (0,)), ("gpu10.cluster", (1, 0)))
PROVENANCE = "tccl plan of plans/x, simulated"


host_names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,8}", fullmatch=True)


@st.composite
def orders(draw):
    hosts = draw(st.lists(host_names, min_size=1, max_size=8, unique=True))
    ranks = st.permutations(range(8)).flatmap(
        lambda gpus: st.integers(1, 8).map(lambda count: tuple(gpus[:count]))
    )
    return [(host, draw(ranks)) for host in hosts]


def test_the_files():
    files = host_order_files(ORDER, provenance=PROVENANCE)
    rank_map = files[RANK_MAP]
    assert files == {
        OPEN_MPI_HOSTFILE: "# tccl plan of plans/x, simulated\n"
        "gpu3 slots=2\ngpu1 slots=1\ngpu10.cluster slots=2\n",
        OPEN_MPI_RANKFILE: "# tccl plan of plans/x, simulated\n"
        "rank 0=gpu3 slot=0\nrank 1=gpu3 slot=1\nrank 2=gpu1 slot=0\n"
        "rank 3=gpu10.cluster slot=0\nrank 4=gpu10.cluster slot=1\n",
        MPICH_MACHINEFILE: "# tccl plan of plans/x, simulated\ngpu3:2\ngpu1:1\ngpu10.cluster:2\n",
        SLURM_HOSTFILE: "gpu3\ngpu3\ngpu1\ngpu10.cluster\ngpu10.cluster\n",
        RANK_MAP: rank_map,
        HOSTS: "gpu3\ngpu1\ngpu10.cluster\n",
    }
    found = msgspec.json.decode(rank_map)
    assert found["ranks"][3] == {"rank": 3, "host": "gpu10.cluster", "gpu": 1}
    assert found["provenance"] == PROVENANCE


def hosts_of_ranks(rankfile):
    """The host of each rank of Open MPI's rankfile, whose ranks are in order."""
    found = re.findall(r"^rank ([0-9]+)=(\S+) slot=[0-9]+$", rankfile, re.MULTILINE)
    assert [int(rank) for rank, _ in found] == list(range(len(found)))
    return tuple(host for _, host in found)


@settings(max_examples=40)
@given(orders(), st.text(max_size=30))
def test_every_file_is_read_back(order, provenance):
    ranks = {host: len(gpus) for host, gpus in order}
    files = host_order_files(order, provenance=provenance)
    for name in (OPEN_MPI_HOSTFILE, MPICH_MACHINEFILE):
        found = parse_host_list(files[name], where="file")
        assert found == tuple(HostSlots(host, count) for host, count in ranks.items())
    per_rank = tuple(host for host, count in ranks.items() for _ in range(count))
    assert hosts_of_ranks(files[OPEN_MPI_RANKFILE]) == per_rank
    assert tuple(files[SLURM_HOSTFILE].splitlines()) == per_rank
    # A host that is named once only leaves its slots open.
    tasks = parse_host_list(files[SLURM_HOSTFILE], where="file")
    assert [(one.name, one.slots or 1) for one in tasks] == [*ranks.items()]
    plain = parse_host_list(files[HOSTS], where="file")
    assert [(one.name, one.slots) for one in plain] == [(host, None) for host in ranks]
    found = json.loads(files[RANK_MAP])["ranks"]
    assert [one["rank"] for one in found] == list(range(len(per_rank)))
    assert tuple(one["host"] for one in found) == per_rank
    assert [one["gpu"] for one in found] == [gpu for _, gpus in order for gpu in gpus]


def test_the_provenance_stays_in_its_line():
    files = host_order_files([("a", (0,))], provenance="x\nevil slots=8\r\n\x1b[31m\u2028y")
    assert files[OPEN_MPI_HOSTFILE] == "# x evil slots=8 [31m y\na slots=1\n"
    assert files[MPICH_MACHINEFILE].splitlines()[1:] == ["a:1"]


def test_ten_thousand_hosts():
    files = host_order_files([(f"gpu{n:05d}", range(8)) for n in range(10_000)])
    assert len(parse_host_list(files[SLURM_HOSTFILE], where="file")) == 10_000
    assert len(hosts_of_ranks(files[OPEN_MPI_RANKFILE])) == 80_000


def test_the_notes_name_every_launcher_and_quote_the_directory():
    notes = launch_notes(ORDER, directory="/plans/my plan")
    for part in (
        "mpirun --hostfile '/plans/my plan/hostfile.openmpi' --map-by slot",
        "mpiexec -machinefile '/plans/my plan/hostfile.mpich' -n 5 ",
        "SLURM_HOSTFILE='/plans/my plan/hostfile.slurm' srun --distribution=arbitrary --ntasks=5 ",
        "torchrun --nnodes=3 --nproc-per-node=RANKS_OF_THIS_HOST --node-rank=$K "
        "--master-addr=gpu3 ",
    ):
        assert part in notes
    equal = (("a", (0, 1)), ("b", (0, 1)))
    assert "--nproc-per-node=2 " in launch_notes(equal)


@pytest.mark.parametrize(
    ("position", "host"),
    [
        *enumerate(host for host, _ in ORDER),
        *((at, f"{host}.job.default.svc") for at, (host, _) in enumerate(ORDER)),
        (-1, "other"),
        (-1, ORDER[0][0] + "0"),
    ],
)
def test_the_node_rank_in_the_notes_is_the_place_in_the_order(position, host, tmp_path):
    assert node_rank(ORDER, host, tmp_path) == position


def test_a_host_finds_its_node_rank_under_a_name_that_is_longer_than_its_own(tmp_path):
    order = [(f"worker-{n}.job.default.svc", (0,)) for n in (0, 1, 10)]
    ranks = [node_rank(order, f"worker-{n}", tmp_path) for n in (0, 1, 10, 2)]
    assert ranks == [0, 1, 2, -1]


def node_rank(order, host, folder):
    """What the notes' line for torchrun gives a host."""
    for name, text in host_order_files(order).items():
        (folder / name).write_text(text)
    notes = launch_notes(order, directory=str(folder))
    command = re.search(r"K=\$\(awk .*\)$", notes, re.MULTILINE)
    assert command is not None
    run = subprocess.run(
        ["bash", "-c", f"HOST={host}; {command[0]}; echo $K"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return int(run.stdout)


# Launchers themselves


def launched(tmp_path, *command: str) -> str:
    """What a launcher says, or a skip by name where it is not one of the kind that is meant."""
    for name, text in host_order_files(ORDER).items():
        (tmp_path / name).write_text(text)
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
        env={
            **os.environ,
            "PRTE_ALLOW_RUN_AS_ROOT": "1",
            "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
    )
    return run.stdout + run.stderr


OPEN_MPI = "mpirun --runtime-options donotlaunch --display map --hostfile hostfile.openmpi"


@pytest.mark.mpi
@pytest.mark.parametrize(
    "options", ["--map-by slot --bind-to none -n 5", "--map-by rankfile:FILE=rankfile.openmpi"]
)
def test_open_mpi_has_the_same_order(options, tmp_path):
    version = launched(tmp_path, "mpirun", "--version")
    if not re.search(r"Open MPI\) 5|PRRTE", version):
        pytest.skip("needs the mpirun of Open MPI 5")
    if "rankfile" in options and (os.cpu_count() or 1) < 2:
        pytest.skip("needs 2 cores, to which the rankfile binds")
    said = launched(tmp_path, *OPEN_MPI.split(), *options.split(), "true")
    found = re.findall(r"Data for node: (\S+)|proc: \[\S+@1,(\d+)\]", said)
    expected = [("gpu3", ""), ("", "0"), ("", "1"), ("gpu1", ""), ("", "2")]
    # Open MPI calls hosts by the first part of their names.
    assert found == [*expected, ("gpu10", ""), ("", "3"), ("", "4")], said


@pytest.mark.mpi
def test_mpich_has_the_same_order(tmp_path):
    needs("mpiexec.hydra")
    # With `fork` it starts the ranks of all hosts here.
    command = ("mpiexec.hydra", "-launcher", "fork", "-machinefile", MPICH_MACHINEFILE, "-n", "5")
    say = "echo $PMI_RANK is $MPI_LOCALRANKID of $MPI_LOCALNRANKS"
    said = launched(tmp_path, *command, "bash", "-c", say)
    expected = ["0 is 0 of 2", "1 is 1 of 2", "2 is 0 of 1", "3 is 0 of 2", "4 is 1 of 2"]
    assert sorted(said.split("\n")[:-1]) == expected
