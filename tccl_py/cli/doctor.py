"""`tccl doctor` and `tccl advise`: what hangs or slows NCCL on a host, and what to try first."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding

from tccl_py.cli import options
from tccl_py.cli.options import MACHINE_HELP, opt
from tccl_py.cli.output import BAD, DOUBT, GOOD, grid, results
from tccl_py.cli.process import ANSWER_IS_NO, notice, print_json
from tccl_py.errors import InputError, interrupts_put_off
from tccl_py.health.doctor import Diagnosis, examine, this_host
from tccl_py.health.host import DriverState, Host
from tccl_py.simulator.descriptions import load_machine
from tccl_py.sources.opening import open_source
from tccl_py.sources.profiled import measured_machine

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
    if root is not None and not any((root / name).is_dir() for name in ("sys", "proc", "etc")):
        right = "name one with sys, proc, etc and dev in it"
        raise InputError(str(root), "is no directory with sys, proc or etc in it", right)
    host = this_host() if root is None else Host(root=root, driver=_COPIED)
    found = examine(host)
    if json:
        print_json(found)
    else:
        _print(found)
    if not found.healthy:
        raise typer.Exit(ANSWER_IS_NO)


def advise(
    machine: Annotated[
        str | None, typer.Argument(metavar="MACHINE", help=f"This one if not given. {MACHINE_HELP}")
    ] = None,
    *,
    json: options.Json = False,
) -> None:
    """Say in ten lines what NCCL does on a machine and what to try first, within a minute.

    This machine's GPUs are measured, by a small part of what `tccl plan` measures, and the host is
    examined as by `tccl doctor`. With MACHINE a model answers, anywhere: for a topology XML or
    `tccl discover -o FILE` by assumed parameters.

    Examples:

        tccl advise
        tccl advise topology.xml
    """
    from tccl_py.health.advice import advise as advice_on  # noqa: PLC0415 (slow)
    from tccl_py.plan.nccl_here import version_to_plan  # noqa: PLC0415

    with interrupts_put_off():
        if machine is None:
            try:
                place = measured_machine()
            except InputError as error:
                right = "name a MACHINE, as in `tccl advise topology.xml`"
                raise InputError(error.where, error.what, right) from error
            diagnosis, version = examine(this_host()), version_to_plan(notice)
            with open_source(place) as source:
                found = advice_on(place, source, diagnosis, version=version)
        else:
            model = load_machine(machine)
            found = advice_on(model, open_source(model))
    if json:
        print_json(found)
        return
    console = results()
    for name, text in found.lines():
        console.print(grid([(name.ljust(9), text)]), style=GOOD if name == "Try first" else "")


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
