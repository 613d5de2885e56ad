"""Whether `tccl verify` found a plan good."""

from __future__ import annotations

from pathlib import Path

from tccl_py.verification.record import VERIFICATION_FILE, load_verification


def why_not_verified(directory: Path) -> str:
    """Why a plan does not count as verified, as the end of a sentence about it; "" if it does.

    Raises:
        InputError: verify.json is unreadable or damaged.
    """
    if not (directory / VERIFICATION_FILE).exists():
        return "was not verified"
    found = load_verification(directory)
    if found is None:
        return "was planned again after it was verified"
    if found.backend != "cuda":
        return "was verified without GPUs"
    if found.failure:
        return "failed when it was verified"
    if not found.accepted:
        slower = "slower than stock NCCL" if found.verdict == "worse" else "not good"
        return f"was found {slower} when it was verified"
    return ""
