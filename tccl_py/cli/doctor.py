"""`tccl doctor`: what on this host will hang NCCL or spoil measurements."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding

from tccl_py.cli import options
from tccl_py.cli.options import opt
from tccl_py.cli.output import BAD, DOUBT, GOOD, grid, results
from tccl_py.cli.process import ANSWER_IS_NO, print_json
from tccl_py.errors import InputError
from tccl_py.health.doctor import Diagnosis, examine, this_host
from tccl_py.health.host import DriverState, Host

_ROOT = "name one with sys, proc, etc and dev in it"
_COPIED = DriverState(unseen="a copy of a host has no driver to ask")
_INDENT = (0, 0, 0, 6)
_WORDS = {"hang": "HANG", "slow": "SLOW", "note": "note"}
_STYLES = {"hang": BAD, "slow": DOUBT, "note": "bold"}


def doctor(
    *,
    root: Annotated[Path | None, opt("DIR", "Look at a copy of another host's files.")] = None,
    json: options.Json = False,
) -> None:
    """Look for causes on this host that hang NCCL, slow it, or spoil measurements.

    Looks at ACS and the IOMMU, PCIe links, P2P and GPU-direct, GPU conditions, NUMA, /dev/shm,
    limits, NCCL's version, settings, files and plugin, containers and virtual machines. Where two
    GPUs or more are idle, NCCL is started on them for its rings. All else is only read; root sees
    more. DIR holds another host's sys, proc, etc and dev. The fix of a finding is printed, never
    run. HANG: NCCL hangs or fails. SLOW: NCCL, or a measurement, gets less than the machine has.

    Exit codes: 0 nothing but notes, 1 something hangs or slows NCCL, 2 wrong use.

    --json has the keys `findings` (a list of `severity`, `check`, `what`, `where`, `measured`,
    `expected`, `why`, `source`, `fix`) and `unseen` (a list of `check`, `what`, `why`).

    Examples:

        tccl doctor
        sudo tccl doctor --json
    """
    if root is not None and not root.is_dir():
        raise InputError(str(root), "is no directory", _ROOT)
    if root is not None and not any((root / name).is_dir() for name in ("sys", "proc", "etc")):
        raise InputError(str(root), "has no sys, proc or etc in it", _ROOT)
    host = this_host() if root is None else Host(root=root, driver=_COPIED)
    found = examine(host)
    if json:
        print_json(found)
    else:
        _print(found)
    if not found.healthy:
        raise typer.Exit(ANSWER_IS_NO)


def _print(found: Diagnosis) -> None:
    console = results()
    for finding in found.findings:
        values = (finding.measured, finding.expected and f"expected {finding.expected}")
        said = ", ".join(value for value in values if value)
        what = f"{finding.what}: {said}" if said else finding.what
        console.print(f"{_WORDS[finding.severity]}  {what}", style=_STYLES[finding.severity])
        lines = [("at", finding.where), ("why", finding.why), ("source", finding.source)]
        lines += [("fix", finding.fix)] if finding.fix else []
        console.print(Padding(grid(lines), _INDENT))
        console.print()
    if found.unseen:
        console.print("Not seen:")
        unseen = [("-", f"{unseen.what}: {unseen.why}") for unseen in found.unseen]
        console.print(Padding(grid(unseen), _INDENT))
        console.print()
    counts: Counter[str] = Counter(finding.severity for finding in found.findings)
    words = {"hang": "may hang NCCL", "slow": "may slow it"}
    parts = [f"{counts[kind]} {text}" for kind, text in words.items() if counts[kind]]
    bad = ", ".join(parts) or "nothing that hangs or slows NCCL"
    notes = f", {counts['note']} to know of" if counts["note"] else ""
    console.print(f"Found: {bad}{notes}.", style=GOOD if found.healthy else BAD)
