"""What commands for the plan of one machine say to the plan of a cluster."""

from __future__ import annotations

from pathlib import Path

from tccl_py.cluster_plan.plan import is_cluster_plan
from tccl_py.errors import InputError


def refuse_cluster(directory: Path, right: str) -> None:
    """Refuse a cluster's plan; whatever else may be wrong, loading it says.

    Raises:
        InputError: it is one; `right` is what to use.
    """
    if is_cluster_plan(directory):
        raise InputError(str(directory), "is the plan of a cluster", right)
