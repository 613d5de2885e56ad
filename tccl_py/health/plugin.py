"""Checks of NCCL's plugin on a host: variables that load it, what keeps jobs from their plan."""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from tccl_py.delivery.plugin import JOB_VARIABLE, PLUGIN_VARIABLE, why_not_trusted
from tccl_py.errors import InputError
from tccl_py.health.host import (
    Defect,
    HostState,
    Results,
    defect,
    files_of_this_host,
    in_force,
    lines_of,
)
from tccl_py.nccl.plugin import LIBRARY
from tccl_py.nccl.plugin.index import (
    INDEX_HEAD,
    INDEX_VARIABLE,
    MAX_GRAPH_BYTES,
    MAX_INDEX_BYTES,
    digest,
)
from tccl_py.nccl.versions import NEWER_VARIABLE, why_no_plugin
from tccl_py.nccl_conf import ConfLine
from tccl_py.plan.host_files import HOSTS_FOLDER
from tccl_py.plan.staging import MANIFEST_FILE
from tccl_py.readers.hosts import NODE_NAME

_CONFLICTING = {
    "NCCL_NET_PLUGIN": "if NCCL takes its network, later communicators get default NCCL",
    "NCCL_TUNER_PLUGIN": "its tuner decides on algorithms and channels, whatever the plan has",
}
_AGAIN = "tccl install DIR, after `tccl plan DIR --force` where the machine or tccl-py has changed"
_NEWER = "tccl install --newer-nccl DIR, which tries a later NCCL here, or --no-plugin"
_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-f-]{36})\s", re.ASCII)


def check_plugin(host: HostState) -> Results:
    """Report a plugin that is installed and does not work, or not for every NCCL here."""
    variables = in_force(host)
    named, index = variables.get(PLUGIN_VARIABLE), _index(host, variables)
    lines = [line for line in (named, *lines_of(host)) if line and line.name == PLUGIN_VARIABLE]
    place = named or index
    if place is None or not (index or any(Path(line.value).name == LIBRARY for line in lines)):
        return
    for fault, fix in _plugin_faults(host, variables, named, index):
        yield defect("plugin", place.where, what=fault, fix=fix)
    # Of its own folder the plugin mends the mode.
    for folder in sorted((host.root / "dev/shm").glob("tccl-*")):
        with suppress(OSError, ValueError):
            status, user = folder.lstat(), int(folder.name[5:])
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != user:
                fault = f"the plugin of user {user} cannot use what user {status.st_uid} made"
                fix = f"rm -r /dev/shm/{folder.name}, as user {status.st_uid} or root"
                yield defect("plugin", f"/dev/shm/{folder.name}", what=fault, fix=fix)
    for name, effect in _CONFLICTING.items():
        line = variables.get(name)
        if line is not None and line.value not in ("", "none"):
            fault = f"{name}={line.value[:60]} is set beside the plugin"
            yield defect("plugin", line.where, severity="note", what=fault, why=effect, fix="")
    newest = variables.get(NEWER_VARIABLE, ConfLine(name=NEWER_VARIABLE, value="", where=""))
    for nccl in host.nccl or ():
        try:
            why = why_no_plugin(nccl.version, newest=newest.value)
        except InputError as error:
            why = why_no_plugin(nccl.version)
            fault = f"{error.where} {error.what}"
            yield defect("plugin", newest.where, what=fault, fix=error.right)
        if why:
            yield defect("plugin", nccl.source, severity="note", what=why, fix=_NEWER)


def plugin_complaints() -> list[str]:
    """Return what keeps an installed plugin from its plan on this host, as sentences."""
    results = [
        result for result in check_plugin(files_of_this_host()) if isinstance(result, Defect)
    ]
    return [f"{bad.where}: {bad.what}" for bad in results if bad.severity != "note"]


def _index(host: HostState, variables: Mapping[str, ConfLine]) -> ConfLine | None:
    """Return the index that the plugin reads: of a job over hosts this host's, by its names."""
    job = variables.get(JOB_VARIABLE)
    if job is None:
        return variables.get(INDEX_VARIABLE)
    own = socket.gethostname()
    names = (own, own.partition(".")[0], host.environment.get(NODE_NAME) or own)
    paths = [f"{job.value}/nccl/{HOSTS_FOLDER}/{name}.index" for name in names]
    return replace(job, value=next(filter(host.has, paths), paths[-1]))


def _plugin_faults(
    host: HostState,
    variables: Mapping[str, ConfLine],
    named: ConfLine | None,
    index: ConfLine | None,
) -> Iterator[tuple[str, str]]:
    """Yield what keeps the plugin from working, and the remedy."""
    if named is None or Path(named.value).name != LIBRARY:
        state = "is not set" if named is None else f"names another plugin, {named.value[:60]}"
        fix = f"unset it; TCCL_ENV_PLUGIN_NEXT=PATH loads another plugin behind {LIBRARY}"
        yield f"{PLUGIN_VARIABLE} {state}: the plan is not used", fix
    elif not host.has(named.value):
        yield f"the plugin's library {named.value} is missing", _AGAIN
    elif host.root == Path("/") and (why := _why_not_loadable(named.value)):
        yield f"the plugin's library {why}", _AGAIN
    if index is None:
        yield f"{INDEX_VARIABLE} is not set: the plugin has no plan", _AGAIN
    elif why := _why_unusable(host, Path(index.value)):
        yield f"the plugin does not use {index.value}: {why}", _AGAIN
    else:
        data = host.data(index.value, limit=MAX_INDEX_BYTES) or b""
        for name, value in re.findall(r"^need (\S+) (\S+)$", data.decode("ascii", "replace"), re.M):
            line = variables.get(name)
            if line is None or line.value.lower() != value.lower():
                state = "is not set" if line is None else f"is {line.value[:60]}"
                yield f"{name} {state}, so that all jobs get default NCCL", f"set {name}={value}"


def _why_not_loadable(path: str) -> str:
    try:
        # What others can replace is not run here either.
        if why := why_not_trusted(Path(path)):
            return f"is not trusted: {why}"
        ctypes.CDLL(path)
    except OSError as error:
        return f"does not load: {error}"
    return ""


def _why_unusable(host: HostState, path: Path) -> str:
    """Return why an index is damaged or stale, as a clause; "" if nothing speaks against it."""
    data = host.data(str(path), limit=MAX_INDEX_BYTES) if path.is_absolute() else None
    if data is None:
        return "it is missing" if path.is_absolute() else "its path is not absolute"
    head, _, body = data.partition(b"digest ")
    written_digest, _, body = body.partition(b"\n")
    if head != INDEX_HEAD and head.startswith(b"tccl-index "):
        return "another version of tccl-py wrote it"
    if head != INDEX_HEAD or written_digest.decode("ascii", "replace") != digest(body):
        return "it is damaged"
    if host.root == Path("/"):
        with suppress(OSError):
            if why := why_not_trusted(path):
                return why
    above = path.parents[1:][path.parent.name == HOSTS_FOLDER :]
    recorded, directory = None, above[0] if above else path.parent
    manifest = host.data(str(directory / MANIFEST_FILE), limit=MAX_INDEX_BYTES)
    with suppress(ValueError, KeyError):
        recorded = json.loads(manifest or b"{}")["files"].get(str(path.relative_to(directory)), "")
    if recorded not in (None, hashlib.sha256(data).hexdigest()):
        return "it is not the index of the plan beside it"
    fields = [line.split(" ") for line in body.decode("ascii", "replace").splitlines()]
    return next((why for words in fields if (why := _why_not(host, path.parent, words))), "")


def _why_not(host: HostState, folder: Path, words: list[str]) -> str:
    """Return why a line of an index does not hold on a host, as a clause."""
    kind, value = words[0], words[1] if len(words) > 1 else "-"
    driver = host.driver_version().partition(".")[0]
    if kind == "driver" and driver and value not in ("-", driver):
        return f"it is for driver {value}, and this is {driver}"
    if kind == "numa" and value not in ("-", str(len(host.numa_nodes()))):
        return f"it is for {value} NUMA nodes, and this host has {len(host.numa_nodes())}"
    if kind == "gpu":
        uuid = _UUID.search(host.text(f"proc/driver/nvidia/gpus/{words[2]}/information") + "\n")
        if uuid is not None and words[3] not in ("-", uuid[1]):
            return f"GPU {value} was {words[3]} and is {uuid[1]}"
        if host.gpus and words[2] not in host.gpus:
            return f"GPU {value} at {words[2]} is gone"
    if kind == "set":
        graph = host.data(str(folder / words[2]), limit=MAX_GRAPH_BYTES)
        if graph is None or digest(graph) != words[3]:
            return f"{words[2]} is missing or was changed"
    return ""
