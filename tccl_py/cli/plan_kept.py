"""What `tccl plan --pin-env` names: variables of the caller's that all jobs have."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tccl_py.errors import InputError
from tccl_py.nccl.pinned_env import PINNABLE, check_pinnable, pinned_level, pinned_values


def kept_here(names: Sequence[str]) -> dict[str, str]:
    """The variables of these names as they are set here, and as NCCL reads them.

    Raises:
        InputError: plans cannot be made under one, or it is not set, or says nothing.
    """
    for name in names:
        check_pinnable(name, where="--pin-env")
        if name not in os.environ:
            right = f"set it as all jobs have it, as in `{name}=... tccl plan`"
            raise InputError(f"--pin-env {name}", "is not set here", right)
    return pinned_values({name: os.environ[name] for name in names}, where="--pin-env")


def not_kept_here(names: Sequence[str]) -> tuple[str, ...]:
    """What to say of variables that are set here, and that a plan is not to be made under."""
    return tuple(
        f"{name}={os.environ[name][:20]} is set here and is not planned for: if all jobs have it, "
        f"add --pin-env {name}"
        for name in PINNABLE
        if name not in names and pinned_level({name: os.environ.get(name, "")}) is not None
    )
