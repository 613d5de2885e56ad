"""One archive of a plan to send to others: what was planned and measured, and nobody's names."""

from __future__ import annotations

import json
import platform
import re
import socket
import zipfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from tccl_py import __version__
from tccl_py.errors import require
from tccl_py.experiments.record import Verification
from tccl_py.files import encode_json, explain_errors, read_text, replacement
from tccl_py.plan.load import load_plan
from tccl_py.plan.plan import Plan
from tccl_py.plan.results import ProvenLinks
from tccl_py.report.verification import report_verification

MARK = b"tccl-py: a plan to send"
"""The comment of the archive, by which an earlier one is known."""
CONTENTS = {
    "topology-*.json": "GPUs, NICs, PCI tree and links of each kind of host",
    ProvenLinks.FILE: "the proof of links",
    "plan.json": "rings, choices and rates",
    Verification.FILE: "times of real jobs",
    "versions.json": "tccl-py, Python, kernel and driver",
}
_DROPPED = ("gpu_uuids", "guid", "conditions", "plan_digest")
"""Keys whose values name one machine; conditions have its kernel command line."""
_NAMED = re.compile(
    r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"  # UUIDs
    r"|\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b"  # of Ethernet
    r"|\b(?:\d{1,3}\.){3}\d{1,3}\b"  # IPv4
    r"|\b(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}\b|\b(?:[0-9a-f]{1,4}:){1,6}:[0-9a-f:]*"  # IPv6
    r"|\b0x[0-9a-f]{12,16}\b"  # GUIDs
    r"|(?<![\w./])~?(?:/[\w.@+-]+){2,}/?",  # paths
    re.IGNORECASE,
)


def write_bundle(directory: Path, target: Path) -> list[str]:
    """Write the archive of a plan's directory, whole or not at all; return what is in it.

    Raises InputError: no plan, or `target` is another file, or cannot be written.
    """
    plan = load_plan(directory)
    known = not target.exists() or MARK in target.read_bytes()[-len(MARK) - 4 :]
    require(known, str(target), "is no archive of `tccl report`", "name a new file")
    held, archive = BytesIO(), list[str]()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as file:
        file.comment = MARK
        for name, text in _texts(plan, directory):
            file.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
            archive.append(name)
    right = "name a file in a folder that there is"
    with explain_errors(target, "cannot be written", right), replacement(target) as handle:
        handle.write(held.getvalue())
    return archive


def _texts(plan: Plan, directory: Path) -> Iterator[tuple[str, str]]:
    names = _names(plan)
    driver: dict[str, str] = {}
    for number, path in enumerate(sorted((directory / "machines").glob("*.json"))):
        machine = json.loads(read_text(path))
        found = machine.get("fingerprint") or {}
        driver.update((key, found[key]) for key in ("driver", "kernel") if key in found)
        yield f"topology-{number}.json", encode_json(_nameless(machine, names))
    held: dict[str, Any] = {"plan.json": plan, ProvenLinks.FILE: ProvenLinks.load(directory)}
    verified = Verification.load(directory)
    held[Verification.FILE] = verified and report_verification(verified)
    for name, value in held.items():
        if value is not None:
            yield name, encode_json(_nameless(json.loads(encode_json(value)), names))
    versions = {"tccl-py": __version__, "python": platform.python_version(), **driver}
    yield "versions.json", encode_json(_nameless(versions, names))


def _names(plan: Plan) -> Mapping[str, str]:
    """Return other names for hosts and switches, the longest first."""
    names = {name: f"host{at}" for at, name in enumerate(plan.cluster.names)}
    names |= {name.partition(".")[0]: other for name, other in names.items()}
    tree = plan.cluster.switches
    switches = () if tree is None else tree.all_switches
    names |= {switch.name: f"switch{at}" for at, switch in enumerate(switches)}
    here = socket.gethostname()
    for name in (here, here.partition(".")[0], socket.getfqdn(), Path.home().name):
        names.setdefault(name, "this-host")
    names.pop("", None)
    return dict(sorted(names.items(), key=lambda pair: -len(pair[0])))


def _nameless(value: Any, names: Mapping[str, str]) -> Any:
    """Return a value of JSON without names of hosts, serial numbers, addresses and paths."""
    if isinstance(value, dict):
        return {
            _nameless(key, names): type(one)() if key in _DROPPED else _nameless(one, names)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [_nameless(one, names) for one in value]
    if not isinstance(value, str):
        return value
    for name, other in names.items():
        value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", other, value)
    return _NAMED.sub("(left out)", value)
