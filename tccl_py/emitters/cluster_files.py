"""What a plan of several hosts becomes beside its graph files: env.sh, which finds a host's own."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from tccl_py.emitters.nccl_conf import env_sh
from tccl_py.errors import InputError
from tccl_py.files import check_path
from tccl_py.runtimes.nccl.settings import Settings

HOSTS_FOLDER = "hosts"
ORDER_FOLDER = "order"
LAUNCH_NOTES = "launch.txt"

# Read by whatever shell a job has: POSIX only, no function, all names its own. `hostname -f` asks
# the name service, which may take long, so only where the names at hand are none of the plan's.
# SLURM's nodes may have other names than their hosts, and lists of a job's hosts have SLURM's.
_CHOICE = """\
unset NCCL_GRAPH_FILE
_tccl_hosts={hosts}
_tccl_name=$(uname -n)
for _tccl_host in "${{SLURMD_NODENAME:-$_tccl_name}}" "$_tccl_name" "${{_tccl_name%%.*}}" ''; do
    if [ -z "$_tccl_host" ]; then
        _tccl_host=$(hostname -f 2>/dev/null || :)
    fi
    if [ -n "$_tccl_host" ] && [ -f "$_tccl_hosts/$_tccl_host.xml" ]; then
        export NCCL_GRAPH_FILE="$_tccl_hosts/$_tccl_host.xml"
        break
    fi
done
if [ -z "${{NCCL_GRAPH_FILE-}}" ]; then
    echo "tccl: no graph file for host $_tccl_name in $_tccl_hosts:" \\
        "NCCL chooses its own rings" >&2
fi
unset _tccl_hosts _tccl_name _tccl_host
"""


def host_graph_file(host: str) -> str:
    """The name of a host's graph file, below `nccl/`.

    >>> host_graph_file("gpu01")
    'hosts/gpu01.xml'
    """
    return f"{HOSTS_FOLDER}/{host}.xml"


def cluster_env_text(settings: Settings, hosts: PurePosixPath, *, provenance: str) -> str:
    """A script to source on every host of a job; it names the graph file of the host it runs on.

    Files are looked for by the name that SLURM's tasks have for it, then by the host's own as it
    is, without its domain, and with it. Where there is none no graph is named, and stderr says so.

    Args:
        settings: of the job.
        hosts: the folder that the graph files are in, from the root.
        provenance: of the plan's rates.

    Raises:
        InputError: the folder is not given from the root or cannot be named in an environment, or
            settings the version does not have.
    """
    check_path(hosts)
    if not hosts.is_absolute():
        right = "jobs start in other directories: give a path from the root"
        raise InputError(f"folder {str(hosts)[:80]!r}", "is no absolute path", right)
    head = (
        f"# tccl-py, rates {provenance}. For jobs over all hosts and GPUs of the plan, with ranks\n"
        f"# in its order of hosts ({ORDER_FOLDER}/{LAUNCH_NOTES}); to be sourced on each host.\n"
    )
    return head + env_sh(settings) + _CHOICE.format(hosts=shlex.quote(str(hosts)))
