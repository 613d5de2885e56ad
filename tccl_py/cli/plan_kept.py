"""What `tccl plan --keep` names: variables of the caller's that all jobs have."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tccl_py.errors import InputError
from tccl_py.runtimes.nccl.kept import check_keepable, limiting


def kept_here(names: Sequence[str]) -> dict[str, str]:
    """The variables of these names as they are set here, and as NCCL reads them.

    Raises:
        InputError: plans cannot be made under one, or it is not set, or limits nothing.
    """
    for name in names:
        check_keepable(name, where="--keep")
        if name not in os.environ:
            right = f"set it as all jobs have it, as in `{name}=... tccl plan`"
            raise InputError(f"--keep {name}", "is not set here", right)
    return limiting({name: os.environ[name] for name in names}, where="--keep")
