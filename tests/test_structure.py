"""The shape of the product, where no linter counts."""

import re
import sys
from pathlib import Path

from tccl_py.sources.opening import open_source
from tccl_py.sources.profiled import measured_machine

PACKAGE = Path(__file__).parent.parent / "tccl_py"
PROFILER = PACKAGE.parent / "profiler"
IN_WORKERS = {"worker.py", "host_device.py"}
"""What runs in a worker alone; its messages, programs and shared memory are the controller's."""
ASKS = re.compile(
    r"\bis_cluster\b|\.closes\b|\.for_all_jobs\b"
    r"|\b(?:if|and|or|not) (?:plan|made|target|cluster|launcher)\.hosts\b(?! is)(?!\[)"
    r"|\blen\((?:\w+\.)*hosts\) (?:[<>=!]=?) [012]\b"
)
"""Whether a plan, a chain or a cluster is of one host, by a property or by its hosts."""
TEXT = (
    "report",
    "explanation",
    "health/pasted.py",
    "plan/text.py",
    "plan/size_choices.py",
    "delivery/scripts.py",
)
"""The text of a plan, and files of launchers, may say something else of several hosts."""


def test_few_places_ask_whether_a_plan_is_of_one_host():
    paths = (path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "merge")
    asking = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if ASKS.search(line)
    ]
    assert len([place for place in asking if not place.startswith(TEXT)]) <= 11, asking


def test_a_set_goes_from_text_to_the_workers_and_back_through_few_files():
    def walked(source, text):
        files = set()

        def note(frame, event, _):
            path = Path(frame.f_code.co_filename)
            if event == "call" and any(map(path.is_relative_to, (PACKAGE, PROFILER))):
                files.add(path.name)

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            source.measure(text)
        finally:
            sys.setprofile(before)
        return sorted((files - {Path(__file__).name}) | IN_WORKERS)

    with open_source(measured_machine("host", 2)) as source:
        source.measure("0:1")
        # On busy cores a set may be measured once more, and a notice says so.
        texts = ("1:0", "0:1{blocks=2}", "1:0{blocks=2}")
        shortest = min((walked(source, text) for text in texts), key=len)
    assert all((PROFILER / "tccl_profiler" / name).is_file() for name in IN_WORKERS)
    assert 15 < len(shortest) <= 21, shortest


def test_the_plugins_files_use_what_stands_above_them_in_their_header_alone():
    folder = PACKAGE / "nccl" / "plugin"
    _, *parts = re.split(r"^/\* (\w+\.c)\b", (folder / "plugin.h").read_text(), flags=re.M)
    homes = {
        name: file
        for file, text in zip(parts[::2], parts[1::2], strict=True)
        for name in re.findall(r"\b(\w+)\(", text)
    }
    # What only NCCL calls has no declaration there.
    order = [*parts[::2], "tuner.c", "env.c"]
    assert sorted(order) == sorted(path.name for path in folder.glob("*.c"))
    for path in folder.glob("*.c"):
        used = {homes[name] for name in re.findall(r"\b(\w+)\(", path.read_text()) if name in homes}
        later = order[order.index(path.name) + 1 :]
        assert used.isdisjoint(later), (path.name, used)


def test_the_architecture_fits_a_page_and_lists_the_packages_in_the_order_of_their_layers():
    page = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    assert len(page.split()) <= 900
    table = page.partition("## Packages")[2].partition("## Ideas")[0]
    cells = re.findall(r"^\| (`\S+`(?:, `\S+`)*) \|", table, re.M)
    listed = re.findall(r"\w+", " ".join(cells))
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} <= {
        *listed
    }
    contract = (PACKAGE.parent / "pyproject.toml").read_text().partition("layers = [")[2]
    layers = re.findall(r"tccl_py\.(\w+)", contract.partition("]")[0])
    assert [name for name in layers if name in listed] == listed


def test_no_room_has_more_lines_than_its_budget():
    section = (PACKAGE.parent / "pyproject.toml").read_text().partition("[tool.tccl.lines]\n")[2]
    budget = {room: int(most) for room, most in re.findall(r"^(\w+) = (\d+)$", section, re.M)}
    lines = dict.fromkeys(budget, 0)
    for path in (*PACKAGE.rglob("*.py"), *PROFILER.rglob("*.py")):
        part = path.relative_to(PACKAGE.parent).parts[1 if path.is_relative_to(PACKAGE) else 0]
        room = part if part in budget else "rest"
        lines[room] += len(path.read_text().splitlines())
    above = {room: count for room, count in lines.items() if count > budget[room]}
    assert not above, "take lines out, or raise the budget and say what the user gets"
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= budget.keys()
