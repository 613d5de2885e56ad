"""Whether `tccl verify` accepted the recommended choice of a plan."""

from __future__ import annotations

from pathlib import Path

from tccl_py.verify.record import VERIFICATION_FILE, load_verification


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
    arm = found.arm(found.recommended)
    if arm is None:
        return f"was verified for the choice {found.chosen} alone"
    if arm.failure:
        return "failed when it was verified"
    return "" if arm.accepted else f"was not accepted when it was verified: {arm.objections[0]}"
