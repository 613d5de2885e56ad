"""tests/gpu/on-hosts: ranks of one mpirun, each on its host, with a stand-in for virtual GPUs."""

import subprocess
from pathlib import Path

import pytest

from tests.skips import mark_needs

AGENT = str(Path(__file__).parent / "gpu" / "on-hosts")
HOSTS = """#!/bin/sh
# Starts a command in namespaces of two hosts, as the program of virtual GPUs does.
export VGPU_WORK="$1" VGPU_HOSTS=2
shift
for host in 0 1; do
    VGPU_HOST=$host unshare --uts --mount \\
        sh -c 'hostname virtual-host$VGPU_HOST; exec "$@"' sh "$@" &
done
wait
"""

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(60),
    mark_needs("root", "nsenter", "setpriv", "unshare"),
]


def test_each_rank_of_mpirun_is_on_the_host_of_its_number(tmp_path):
    script = tmp_path / "hosts"
    script.write_text(HOSTS)
    script.chmod(0o755)
    launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", AGENT, "--rank"]
    program = 'echo "$OMPI_COMM_WORLD_RANK $(hostname) $NCCL_HOSTID $(pwd) $VGPU_CONFIG"'
    done = subprocess.run(
        [script, tmp_path, AGENT, *launch, "sh", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} virtual-host{rank} virtual-host{rank} {tmp_path} {tmp_path}/gpus-{rank}"
        for rank in (0, 1)
    ]
