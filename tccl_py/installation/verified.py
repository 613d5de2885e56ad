"""Whether `tccl verify` found a plan good."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from tccl_py.files import decode_json, read_bytes, read_text
from tccl_py.plan.plan import PLAN_FILE

VERIFICATION_FILE = "verify.json"


class _Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The part of verify.json that says whether a plan may be used."""

    verdict: str | None = None
    backend: str = "cuda"
    failure: str = ""
    plan_digest: str = ""


def why_not_verified(directory: Path) -> str:
    """Why a plan does not count as verified, as the end of a sentence about it; "" if it does.

    Raises:
        InputError: verify.json is unreadable or damaged.
    """
    path = directory / VERIFICATION_FILE
    if not path.exists():
        return "was not verified"
    found = decode_json(read_text(path), _Verified, where=str(path), name="a verification")
    digest = hashlib.blake2b(read_bytes(directory / PLAN_FILE), digest_size=8).hexdigest()
    if found.plan_digest not in ("", digest):
        return "was planned again after it was verified"
    if found.backend != "cuda":
        return "was verified without GPUs"
    if found.failure or found.verdict is None:
        return "failed when it was verified"
    if found.verdict not in ("better", "same"):
        return f"was found {found.verdict[:20]!a} than stock NCCL"
    return ""
