"""Judge the tests by small faults of the code, each of which some test has to see.

tests/mutants has a file of them for each room. `judge-tests` copies the checkout, checks that the
tests pass there, applies one fault after the other, and runs the tests that are named with it. It
prints the faults that live, and how many were seen. Exits with 1 where one lives or no longer fits.
"""

import argparse
import ast
import io
import itertools
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "tests" / "mutants"
LIMIT_S = 300
OWN = ("scripts", "tccl_profiler", "tccl_py", "tests")


class Mutant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A fault: `old`, which is once in a function, is `new` in its place.

    `function` is NAME, CLASS.NAME, or "" for the whole file; `tests` are pytest's arguments.
    """

    file: str
    function: str
    behaviour: str
    old: str
    new: str
    tests: str

    def changed(self, root: Path) -> str:
        """Return the file's text with the fault. Raises ValueError: it is not once in there."""
        text = (root / self.file).read_text()
        start, end = extent(text, self.function, self.file)
        if (found := text[start:end].count(self.old)) != 1:
            raise ValueError(f"{self.file}, {self.function}: {found} times {self.old!r}")
        return text[:start] + text[start:end].replace(self.old, self.new) + text[end:]


def read_mutants(paths: list[Path]) -> dict[str, list[Mutant]]:
    """Return the mutants of files, by room."""
    return {p.stem: msgspec.yaml.decode(p.read_bytes(), type=list[Mutant]) for p in sorted(paths)}


def extent(text: str, function: str, file: str) -> tuple[int, int]:
    """Return where a function begins and ends in a text; ValueError: it is not there."""
    if not function:
        return 0, len(text)
    if not file.endswith(".py"):
        body = re.search(rf"^\w[^;\n]*\b{function}\([^;{{}}]*\{{\n.*?^\}}", text, re.M | re.S)
        if body is None:
            raise ValueError(f"{file} has no function {function}")
        return body.span()
    node: Any = ast.parse(text)
    for name in function.split("."):
        inner = [
            part
            for part in ast.iter_child_nodes(node)
            if isinstance(part, (ast.FunctionDef, ast.ClassDef)) and part.name == name
        ]
        if not inner:
            raise ValueError(f"{file} has no {function}")
        node = inner[-1]
    lines = text.splitlines(keepends=True)
    return len("".join(lines[: node.lineno - 1])), len("".join(lines[: node.end_lineno]))


def copy_checkout(folder: Path) -> None:
    """Copy the files that git has, and those that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _be_pytest(copy: Path, arguments: list[str], output: Path) -> None:
    os.chdir(copy)
    os.setpgid(0, 0)
    os.environ["PYTHONPATH"] = f"{copy}:{copy / 'profiler'}"
    sys.path[:0] = [str(copy), str(copy / "profiler")]
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        with redirect_stdout(io.TextIOWrapper(file.buffer, write_through=True)):
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])
    os._exit(code)


def run_tests(copy: Path, arguments: list[str]) -> tuple[int, str]:
    """Run tests in a copy; return pytest's exit code (-9: they took too long), and its output."""
    output = copy.with_name("output")
    process = multiprocessing.get_context("fork").Process(
        target=_be_pytest, args=(copy, arguments, output)
    )
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        os.killpg(process.pid, 9)
        process.join()
    return process.exitcode, output.read_text(errors="replace")


_SECONDS = itertools.count(int(time.time()))


def _write(path: Path, text: str) -> None:
    """Write a file with a time of its own: bytecode is known by its file's second and length."""
    path.write_text(text)
    os.utime(path, (second := next(_SECONDS), second))


def judge(mutant: Mutant, copy: Path) -> tuple[bool, str]:
    """Return whether a mutant is seen, and a line on it."""
    path = copy / mutant.file
    right = path.read_text()
    try:
        _write(path, mutant.changed(copy))
    except ValueError as error:
        return False, f"no longer fits: {error}"
    start = time.monotonic()
    try:
        code, said = run_tests(copy, shlex.split(mutant.tests))
    finally:
        _write(path, right)
    if code in (0, 5) or code == 4:
        words = "lives" if code == 0 else "its tests do not run"
        return False, f"{words}: {mutant.file}, {mutant.function}: {mutant.behaviour}"
    failed = next(iter(re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M)), f"exit {code}")
    return True, f"seen in {time.monotonic() - start:.0f} s by {failed}: {mutant.behaviour}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="judge-tests", description=__doc__)
    parser.add_argument("--room", action="append", help="a file of tests/mutants, without .yaml")
    parser.add_argument("--only", default="", help="mutants with this in file or behaviour")
    parser.add_argument("--list", action="append", type=Path, help="another list of mutants")
    parser.add_argument("--unsound", action="store_true", help="do not run the tests unchanged")
    options = parser.parse_args()
    paths = options.list or sorted(MUTANTS.glob("*.yaml"))
    rooms = read_mutants([path for path in paths if path.stem in (options.room or [path.stem])])
    for modules in ("hypothesis", "networkx", "numpy", "scipy.optimize", "typer", "yaml"):
        __import__(modules)
    lives = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        copy_checkout(copy)
        for room, listed in rooms.items():
            mutants = [m for m in listed if options.only in f"{m.file} {m.behaviour}"]
            seen = 0
            for tests in () if options.unsound else dict.fromkeys(m.tests for m in mutants):
                code, said = run_tests(copy, shlex.split(tests))
                if code:
                    sys.exit(f"without a fault, {tests} exits with {code}:\n{said[-3000:]}")
            for mutant in mutants:
                good, line = judge(mutant, copy)
                seen += good
                print(f"  {line}", flush=True)
            print(f"{room}: {seen} of {len(mutants)} seen", flush=True)
            lives += len(mutants) - seen
    return int(lives > 0)


if __name__ == "__main__":
    sys.exit(main())
