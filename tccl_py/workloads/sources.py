"""A workload from whatever a user names: a bundled name, its file, or files of a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from tccl_py.errors import InputError, require, spell
from tccl_py.files import reading
from tccl_py.workloads.assembly import workload_of
from tccl_py.workloads.nccl_log import read_nccl_logs
from tccl_py.workloads.torch_trace import GZIP, read_torch_traces
from tccl_py.workloads.workload import BUNDLED, Workload, load_bundled, read_workload

MAX_FILES = 1 << 16
_HEAD = 1 << 16
_LOGS, _TRACES = "NCCL's logs", "PyTorch's profiler"
_WORKLOAD = "a workload"
_OF_TRACES = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
"""Keys with which a trace begins. Any other object is taken for a workload."""
_READERS = {_LOGS: read_nccl_logs, _TRACES: read_torch_traces}


def open_workload(names: Sequence[str], *, name: str = "", ranks: int = 8) -> Workload:
    """Return the workload of one file, or of a job's logs or traces; folders stand for their files.

    A bundled one is for `ranks`. InputError: no such name or file, files of several kinds, or as
    their reader.
    """
    if len(names) == 1 and names[0] in BUNDLED:
        return load_bundled(names[0], ranks)
    missing = next((text for text in names if not Path(text).exists()), None)
    right = f"name one bundled workload, of {', '.join(BUNDLED)}, or files of a job"
    require(missing is None, f"workload {missing!r}", "is no file", right)
    paths = sorted(chain.from_iterable(_files(Path(text)) for text in names))
    require(paths, ", ".join(names), "has no files", "name the files of a job")
    require(len(paths) <= MAX_FILES, names[0], f"has {len(paths)} files", f"at most {MAX_FILES}")
    kinds = {path: _kind(path) for path in paths}
    if set(kinds.values()) == {_WORKLOAD} and len(paths) == 1:
        return read_workload(paths[0])
    stray = next((path for path in paths if kinds[path] == _WORKLOAD), None)
    right = "name a single workload, or the logs or traces of one job"
    require(stray is None, str(stray), "is neither a log nor a trace", right)
    first, *others = sorted(paths, key=lambda path: kinds[path] != kinds[paths[0]])
    if others and kinds[first] != kinds[others[-1]]:
        fault = f"is a file of {kinds[others[-1]]}, and {first} of {kinds[first]}"
        raise InputError(str(others[-1]), fault, "name the files of one job")
    kind = kinds[paths[0]]
    source = f"{kind} in {spell(len(paths), 'file')}"
    return workload_of(_READERS[kind](paths), name=name or paths[0].name, source=source)


def workload_for(text: str) -> Callable[[int], Workload]:
    """Return a workload by its number of ranks: a bundled one, or that of a file whatever it is.

    Raises InputError: no such name or file, or it is none.
    """
    if text in BUNDLED:
        return partial(load_bundled, text)
    made = open_workload([text])
    return lambda _: made


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = (file for file in path.iterdir() if not file.name.startswith("."))
    return [file for file in files if file.is_file() and file.stat().st_size]


def _kind(path: Path) -> str:
    """Return the kind of a file by its first bytes."""
    with reading(path) as handle:
        head = handle.read(_HEAD).lstrip()
    if head.startswith(GZIP):
        return _TRACES
    if not head.startswith(b"{"):
        return _LOGS
    return _TRACES if any(key in head for key in _OF_TRACES) else _WORKLOAD
