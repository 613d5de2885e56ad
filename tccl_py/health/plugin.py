"""The NCCL plugin on a host: the variables that load it, and what keeps jobs from their plan."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tccl_py.health.host import Finding, Found, Host, defect
from tccl_py.nccl.plugin import LIBRARY
from tccl_py.nccl.plugin.index import (
    INDEX_VARIABLE,
    MAX_GRAPH_BYTES,
    MAX_INDEX_BYTES,
    digest,
)
from tccl_py.nccl.versions import why_no_plugin
from tccl_py.nccl_library import CONF_VARIABLE, HOST_FILE, ConfLine, conf_lines, home
from tccl_py.plan.beside import PLUGIN_VARIABLE, why_not_trusted
from tccl_py.plan.staging import MANIFEST_FILE

ENVIRONMENT = "the environment"
_OTHERS = {
    "NCCL_NET_PLUGIN": "if NCCL takes its network, later communicators get default NCCL",
    "NCCL_TUNER_PLUGIN": "its tuner decides on algorithms and channels, whatever the plan has",
}
_AGAIN = "tccl install DIR, after planning again with --force where the plan's machine has changed"
_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-f-]{36})\s", re.ASCII)


def lines_of(host: Host) -> list[ConfLine]:
    """Return the lines of NCCL's files, the user's first."""
    own = host.environment.get(CONF_VARIABLE) or f"{host.home}/.nccl.conf"
    paths = (own, str(HOST_FILE))
    return [line for path in paths for line in conf_lines(host.data(path) or b"", where=path)]


def in_force(host: Host) -> dict[str, ConfLine]:
    """Return the variables of jobs by name: the environment's, then the first of the files."""
    found: dict[str, ConfLine] = {}
    for name, value in host.environment.items():
        found[name] = ConfLine(name=name, value=value, where=ENVIRONMENT)
    for line in lines_of(host):
        found.setdefault(line.name, line)
    return found


def check_plugin(host: Host) -> Found:
    """Report a plugin that is installed and does not work, or not for every NCCL here."""
    variables, files = in_force(host), lines_of(host)
    installed = [line for line in files if line.name in (PLUGIN_VARIABLE, INDEX_VARIABLE)]
    named, index = variables.get(PLUGIN_VARIABLE), variables.get(INDEX_VARIABLE)
    ours = any(Path(line.value).name == LIBRARY for line in (*installed, *filter(None, [named])))
    if not ours and index is None:
        return
    place = named or index or installed[0]
    for what, fix in _wrong(host, named, index):
        yield defect("plugin", place.where, what=what, fix=fix)
    for name, effect in _OTHERS.items():
        other = variables.get(name)
        if other is not None and other.value not in ("", "none"):
            what = f"{name}={other.value[:60]} is set beside the plugin"
            yield defect("plugin", other.where, severity="note", what=what, why=effect, fix="")
    for nccl in host.nccl or ():
        if why := why_no_plugin(nccl.version):
            fix = "tccl install --no-plugin DIR, for programs that load this NCCL"
            yield defect("plugin", nccl.source, severity="note", what=why, fix=fix)


def plugin_complaints() -> list[str]:
    """Return what keeps an installed plugin from its plan on this host, as sentences."""
    host = Host(home=str(home()), environment=dict(os.environ))
    found = [result for result in check_plugin(host) if isinstance(result, Finding)]
    return [f"{one.where}: {one.what}" for one in found if one.severity != "note"]


def _wrong(host: Host, named: ConfLine | None, index: ConfLine | None) -> Iterator[tuple[str, str]]:
    """Yield what keeps the plugin from working, and the remedy."""
    if named is None or Path(named.value).name != LIBRARY:
        said = "is not set" if named is None else f"names another plugin, {named.value[:60]}"
        fix = f"unset it; TCCL_ENV_PLUGIN_NEXT=PATH loads another plugin behind {LIBRARY}"
        yield f"{PLUGIN_VARIABLE} {said}: the plan is not used", fix
    elif not host.has(named.value):
        yield f"the plugin's library {named.value} is missing", _AGAIN
    elif host.root == Path("/") and (why := _why_not_loadable(named.value)):
        yield f"the plugin's library does not load: {why}", _AGAIN
    if index is None:
        yield f"{INDEX_VARIABLE} is not set: the plugin has no plan", _AGAIN
    elif why := _why_unusable(host, Path(index.value)):
        yield f"the plugin does not use {index.value}: {why}", _AGAIN


def _why_not_loadable(path: str) -> str:
    try:
        ctypes.CDLL(path)
    except OSError as error:
        return str(error)
    return ""


def _why_unusable(host: Host, path: Path) -> str:
    """Return why an index is damaged or stale, as a clause; "" if nothing speaks against it."""
    data = host.data(str(path), limit=MAX_INDEX_BYTES)
    if data is None:
        return "it is missing"
    head, _, body = data.partition(b"digest ")
    told, _, body = body.partition(b"\n")
    if head != b"tccl-index 1\n" or told.decode("ascii", "replace") != digest(body):
        return "it is damaged"
    if host.root == Path("/"):
        with suppress(OSError):
            if why := why_not_trusted(path):
                return why
    listed = None
    with suppress(ValueError, KeyError):
        manifest = json.loads(
            host.data(str(path.parent.parent / MANIFEST_FILE), limit=MAX_INDEX_BYTES) or b"{}"
        )
        listed = manifest["files"].get(f"nccl/{path.name}", "")
    if listed not in (None, hashlib.sha256(data).hexdigest()):
        return "it is not the index of the plan beside it"
    fields = [line.split(" ") for line in body.decode("ascii", "replace").splitlines()]
    return next((why for words in fields if (why := _why_not(host, path.parent, words))), "")


def _why_not(host: Host, folder: Path, words: list[str]) -> str:
    """Return why a line of an index does not hold on a host, as a clause."""
    kind, value = words[0], words[1] if len(words) > 1 else "-"
    driver = host.driver_version().partition(".")[0]
    if kind == "driver" and driver and value not in ("-", driver):
        return f"it is for driver {value}, and this is {driver}"
    if kind == "numa" and value not in ("-", str(len(host.numa_nodes()))):
        return f"it is for {value} NUMA nodes, and this host has {len(host.numa_nodes())}"
    if kind == "gpu":
        text = host.text(f"proc/driver/nvidia/gpus/{words[2]}/information") + "\n"
        now = _UUID.search(text)
        if now is not None and words[3] not in ("-", now[1]):
            return f"GPU {value} was {words[3]} and is {now[1]}"
        if host.gpus and words[2] not in host.gpus:
            return f"GPU {value} at {words[2]} is gone"
    if kind == "set":
        graph = host.data(str(folder / words[2]), limit=MAX_GRAPH_BYTES)
        if graph is None or digest(graph) != words[3]:
            return f"{words[2]} is missing or was changed"
    return ""
