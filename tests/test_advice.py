"""What texts of the program advise can be done: commands and options exist, packages too."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import COMMANDS as NAMES
from tccl_py.cli.main import app, load_command

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("tccl_py", "profiler/tccl_profiler")
    for path in (ROOT / folder).rglob("*.py")
)
COMMANDS = {name: load_command(name) for name in NAMES}
OPTIONS = {
    name: {"--help", *(o for one in command.params for o in (*one.opts, *one.secondary_opts))}
    for name, command in COMMANDS.items()
}
OPTION = r"(?<![\w-])--?[a-z][a-z0-9-]*"
OTHERS = r"docker|mpirun|numactl|nvidia-smi|srun|systemctl|torchrun"
"""Programs whose options are their own; so are those of launchers' lines in `plan/host_files`."""
EXEMPT = {"plan/host_files.py", "nccl/plugin/build.py", "cli/main.py", "cli/verify.py"}


def texts(path: Path) -> Iterator[str]:
    """All strings of a module, docstrings too (they are commands' help), each f-string as one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(one) for one in node.values}
            yield "".join(
                one.value if isinstance(one, ast.Constant) else "X" for one in node.values
            )
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        ):
            yield node.value


def advised(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every `tccl COMMAND` in a text, with the options behind it."""
    for found in re.finditer(r"(?<!/)\btccl ([a-z]+)((?: +[^\s`'\";,)]+)*)", text):
        yield found[1], re.findall(OPTION, found[2].partition(" -- ")[0])


def bare_options(text: str) -> set[str]:
    """The long options in a text that stand behind no program."""
    alone = re.sub(rf"\b(?:tccl [a-z]+|{OTHERS}) [^`;]*", "", text)
    return {one for one in re.findall(OPTION, alone) if one.startswith("--")}


OF_SERVERS = {"--disable-custom-all-reduce", "--enable-symm-mem"}
"""Options of vLLM and SGLang."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_options_in_texts_exist(path):
    known = {"--version", *OF_SERVERS}.union(*OPTIONS.values())
    for text in texts(path):
        for name, options in advised(text):
            if f"`tccl {name}" in text:
                assert name in COMMANDS, text
            assert set(options) <= OPTIONS.get(name, set(options)), text
        if not str(path).endswith(tuple(EXEMPT)):
            assert bare_options(text) <= known, text


@pytest.mark.parametrize("name", COMMANDS)
def test_options_in_the_texts_of_a_commands_module_are_its_own(name):
    module = sys.modules[COMMANDS[name].callback.__module__]
    beside = [
        other for other, one in COMMANDS.items() if one.callback.__module__ == module.__name__
    ]
    known = set().union(*(OPTIONS[other] for other in beside))
    for text in texts(Path(module.__file__)):
        assert bare_options(text) <= known, text


WITHOUT_GPUS = (
    "discover -o machine.json",
    "measure G0->G0->G1",
    "plan -o other",
    "plan -o other --tune",
    "verify plan",
)


@pytest.mark.parametrize("line", WITHOUT_GPUS)
def test_without_gpus_a_command_advises_options_that_it_has(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    run.invoke(app, ["plan", "plan", "--simulate", "amd-v100", "--max-sets", "5"])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    name, *arguments = line.split()
    result = run.invoke(app, [name, *arguments])
    assert result.exit_code == 2
    assert bare_options(result.stderr) <= OPTIONS[name], result.stderr
    for other, options in advised(result.stderr):
        assert set(options) <= OPTIONS[other], result.stderr


def test_packages_that_texts_advise_to_install_are_requirements():
    required = {
        re.match(r"[\w-]+", one)[0] for one in metadata.metadata("tccl-py").get_all("Requires-Dist")
    }
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [text for path in SOURCES for text in texts(path)]
    found += [page.read_text(encoding="utf-8") for page in pages]
    named = [word for text in found for word in re.findall(r"pip install ['\"]?([^\s`'\"]+)", text)]
    assert {"torch", "mpi4py"} <= set(named)
    extras = set(metadata.metadata("tccl-py").get_all("Provides-Extra"))
    # The extra of the driver's CUDA is known when it runs: tests/test_live_discovery.py has them.
    # What follows --no-deps is another NCCL for torch.
    # Files of scripts/release are named by their folder.
    files = {word for word in named if word.startswith("dist/")}
    for word in set(named) - files - {".[X]", "--no-deps"}:
        # tccl-py itself is in no registry: it is installed from its folder.
        folder = re.fullmatch(r"\.(?:\[([\w,]+)\])?", word)
        if folder is None:
            assert word in required - {"tccl-py"}, word
        else:
            assert set((folder[1] or "mpi").split(",")) <= extras, word
