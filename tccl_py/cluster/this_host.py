"""What this host may be called in a list of hosts or a plan."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

NODE_NAME = "SLURMD_NODENAME"
"""SLURM's name for the node that a task runs on, which need not be what the host calls itself."""


def names_of_this_host() -> Iterator[str]:
    """Its names: SLURM's if this is a task of a job, then shortest to find out first."""
    if os.environ.get(NODE_NAME):
        yield os.environ[NODE_NAME]
    name = socket.gethostname()
    yield name
    yield name.partition(".")[0]
    # This asks the name service, which may take long.
    yield socket.getfqdn()
