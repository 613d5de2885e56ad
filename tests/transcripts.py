"""Transcripts of commands: what is typed, what it prints, and its exit code.

In tests/transcripts/NAME.txt, of the command NAME:

    ;; words for the reader
    $ tccl COMMAND ...   # jobs: variables 1.3
    what it prints on standard output
    ! what it prints on standard error
    [exit 2]

Lines of `tccl` run in this process, others in a shell, which makes files; both in a folder of
their own that has `cases` and `plans` of the project, and recorded hosts in `recorded`.
NAME=VALUE before `tccl` sets a variable. `> FILE` at the end takes what is printed; plans of one
command line are made once. Stand-ins are told behind three spaces: `# GPUs: NAME`, a model that
answers as if it were measured, with `slower: G2 0.5` for a link, and how fast jobs are that have
something, in parts of default NCCL: `# jobs: variables 1.3, NCCL_ALGO=Tree 0.9`; `send:` is for
send/recv, `graph fails` and `graph wrong` for jobs with a graph file. Seconds that passed are
written as N, and numbers of JSON with 6 digits.
"""

import json
import math
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from msgspec.structs import replace
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.experiments import plans, preflight
from tccl_py.experiments.spec import WrongValue
from tccl_py.health import advice
from tccl_py.simulator.source import Simulator
from tests.drifting import with_slower_link
from tests.recorded_hosts import RECORDED, recorded
from tests.sessions import Fake, measures_by
from tests.verified import FakeJobs, by_variables, without_gpus

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "tests" / "transcripts"
HERE = "/here"
MEASURING = ("tccl_py.cli.measure", "tccl_py.sources.profiled", "tccl_py.planning.plan_sources")
_SET = re.compile(r"[A-Z][A-Z0-9_]*=.*")
_KEPT = tempfile.TemporaryDirectory(prefix="t", dir="/tmp")
_MADE: dict[tuple[str, ...], Path] = {}
_TAKEN = re.compile(
    r'(compared in |rounds, .* in |% at most; |"seconds": |(?:duration|timestamp)_seconds{.*} )'
    r"[0-9.e-]+"
    r"|(a line takes ).*"
)
_WHOLE = {"break_long_words": False, "break_on_hyphens": False}


@contextmanager
def folder():
    """A folder for commands, with a path as long as any other's, so that lines break alike."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as place:
        for path in (ROOT / "tests/cases", ROOT / "plans"):
            (Path(place) / path.name).symlink_to(path)
        for host in RECORDED.glob("*.txt"):
            recorded(host.stem, Path(place) / "recorded" / host.stem)
        yield Path(place)


def run_again(text, place, monkeypatch):
    """The transcript with what its commands print now."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(place)))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(advice, "SECONDS", 1e6)
    for name in ("gethostname", "getfqdn"):
        monkeypatch.setattr(socket, name, lambda: "login")
    written = []
    for line in text.splitlines():
        if line.startswith("$ "):
            with monkeypatch.context() as patched:
                printed = _run(line.removeprefix("$ "), patched)
            written += [line, *printed.replace(str(place), HERE).splitlines()]
        elif line.startswith(";;") or not line:
            written += [line] if line or written[-1:] != [""] else []
    return "\n".join(written).rstrip() + "\n"


def _run(line, monkeypatch):
    if " tccl " not in f" {line}":
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
        return _shown(done.stdout, done.stderr, done.returncode)
    command, _, stand_ins = line.replace(HERE, str(Path.cwd())).partition("   # ")
    words = shlex.split(command)
    while _SET.fullmatch(words[0]):
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    _stand_in(stand_ins, monkeypatch)
    file = words.pop() if words[-2:-1] == [">"] else None
    words = words[:-1] if file else words
    if words[1:2] == ["run"]:
        return _shown(*_run_apart(words[1:]))
    once = (*words[3:], stand_ins) if words[1] == "plan" and "--quiet" in words and file else None
    if once in _MADE:
        shutil.copytree(_MADE[once], words[2])
        return ""
    result = CliRunner().invoke(app, words[1:], prog_name="tccl")
    if file:
        Path(file).write_text(result.stdout)
    if once:
        _MADE[once] = shutil.copytree(words[2], Path(_KEPT.name) / str(len(_MADE)))
    return _shown("" if file else result.stdout, result.stderr, result.exit_code)


def _stand_in(said, monkeypatch):
    """Let GPUs and jobs be stand-ins."""
    parts = dict(one.split(": ") for one in said.split("; ") if one)
    if "GPUs" in parts:
        session = Fake(parts["GPUs"])
        if "slower" in parts:
            device, left = parts["slower"].split()
            session.simulator = Simulator(with_slower_link(session.model, device, float(left)))
        measures_by(monkeypatch, session, *MEASURING)
        backend = {"backend": "cuda"}
        monkeypatch.setattr(preflight, "users_of", lambda gpus: "")
        monkeypatch.setattr(
            plans, "machine_launcher", lambda *of: replace(without_gpus(*of), **backend)
        )
    jobs = _jobs([one.rsplit(" ", 1) for one in parts.get("jobs", "").split(", ") if one])
    monkeypatch.setattr(plans, "LocalRunner", lambda server: jobs)
    monkeypatch.setattr(plans, "check_torch", lambda: None)


def _jobs(facts):
    """Jobs by facts as `variables 1.3`: so much faster, where a job has this or NAME=VALUE."""
    factors = [(what, float(fact)) for what, fact in facts if fact not in ("fails", "wrong")]

    def has(environment, what):
        if what in ("default", "graph", "variables"):
            has_file, is_told = "NCCL_GRAPH_FILE" in environment, by_variables(environment)
            return what == ("graph" if has_file else "variables" if is_told else "default")
        name, _, value = what.partition("=")
        return environment.get(name) == value

    def gain(environment, send=False):
        return math.prod(
            factor
            for what, factor in factors
            if (what[:5] == "send:") == send and has(environment, what.removeprefix("send:"))
        )

    broken = [what for what, fault in facts if fault == "fails"]
    return FakeJobs(
        lambda size, environment: (1e-4 + size / 1e10) / gain(environment),
        noise=0.001,
        transfers=lambda environment: 1 / gain(environment, send=True),
        fails=lambda environment: "out of memory" * any(has(environment, one) for one in broken),
        wrong=(WrongValue(case="scatter, int32 x 3", rank=1, what="1 of 3"),)
        * any(fault == "wrong" for _, fault in facts),
    )


def _run_apart(words):
    """What a command prints in a child, since another program takes its place."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if not (pid := os.fork()):
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            try:
                app(words, prog_name="tccl")
            except SystemExit as ended:
                sys.stdout.flush()
                os._exit(ended.code or 0)
            os._exit(70)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [file.seek(0) or file.read() for file in (out, err)]
    return *texts, code


def _shown(out, err, code):
    if out.startswith(("{", "[")):
        out = _in_few_lines(json.loads(out, parse_float=lambda text: float(f"{float(text):.6g}")))
    lines = [line.rstrip() for line in out.splitlines()]
    lines += [f"! {line}".rstrip() for line in err.splitlines()]
    lines += [f"[exit {code}]"] * bool(code)
    return _TAKEN.sub(r"\1\2N", "\n".join(lines))


def _in_few_lines(value, indent=1):
    """JSON in few lines; of lists of objects the first two."""
    text = _TAKEN.sub(r"\1\2N", json.dumps(value, ensure_ascii=False))
    nested = isinstance(value, list | dict) and any(
        isinstance(one, list | dict) and one
        for one in (value.values() if isinstance(value, dict) else value)
    )
    if len(text) + indent <= 100 or not nested:
        return textwrap.fill(text, 100, subsequent_indent=" " * indent, **_WHOLE)
    if isinstance(value, dict):
        rows = [f'"{name}": {_in_few_lines(one, indent + 1)}' for name, one in value.items()]
    else:
        rows = [_in_few_lines(one, indent + 1) for one in value]
        if isinstance(value[0], dict) and len(rows) > 3:
            rows[2:] = [f"... {len(rows)} in all"]
    first, last = "{}" if isinstance(value, dict) else "[]"
    lines = ",\n".join(" " * indent + row for row in rows)
    return f"{first}\n{lines}\n{' ' * (indent - 1)}{last}"
