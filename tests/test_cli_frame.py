"""The frame of the `tccl` command: exit codes, sentences, help, output that cannot be written."""

import ast
import json
import math
import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from inspect import getdoc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tccl_py
from tccl_py.cli.main import COMMANDS as NAMES_OF_ALL
from tccl_py.cli.main import load_command
from tccl_py.cli.options import RULES, gpus_argument
from tccl_py.cli.output import ProgressLine, grid, print_table, results
from tccl_py.errors import InputError, MeasurementError
from tccl_py.files import decode_json, encode_json
from tccl_py.model.cluster import parse_gpus
from tccl_py.model.measurement import mark as provenance
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.search.problem import Progress
from tccl_py.simulator.descriptions import load_bundled, load_machine
from tccl_py.sources.profiled import MeasurementOptions
from tests.commands import tccl
from tests.nccl_cases import CASES
from tests.planned import SMALL, as_only, plan_of
from tests.toy import toy_machine

TOPOLOGY = CASES / "topologies" / "h200x4-vm.xml"
GRAPH = CASES / "h200x4-vm" / "graph.xml"
COMMANDS = ("discover", "measure", "validate")
SET = "G0->G0->G1"
ON = ("--simulate", "h200x4-vm")
OF = ("--machine", "h200x4-vm")


def process(*arguments, **options):
    command = [sys.executable, "-m", "tccl_py", *arguments]
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(
        command, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options
    )


FILES = {
    "is larger than 33554432 bytes": b"[" * (32 << 20 | 1),
    "is no machine in JSON or XML": b"hello",
    "describes no machine": b"{}",
    "is nested too deep": (b'{"gpus":' * 100_000),
    "is no NCCL topology": b"<html></html>",
}


@pytest.mark.parametrize("sentence", FILES)
def test_a_file_that_is_no_machine_is_refused_by_name(sentence, tmp_path):
    path = tmp_path / "box"
    path.write_bytes(FILES[sentence])
    result = tccl("discover", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"tccl: {path}")
    assert f" {sentence}" in result.stderr


PLANS = Path(__file__).parent.parent / "plans"
HOSTILE = "x\x07\x1b[31m\x9b31m\x7f\u202e\n"
SHOWN = r"x\x07\x1b[31m\x9b31m\x7f\u202e\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("measure", SET, "--backend", HOSTILE),
        ("discover", f"no/{HOSTILE}"),
        ("validate", f"no{HOSTILE}", *OF),
    ],
)
def test_an_error_shows_control_characters_and_sends_none(arguments):
    result = tccl(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert SHOWN.removesuffix(r"\n") in result.stderr
    assert result.stderr.removesuffix("\n").isprintable()


def test_an_error_of_the_library_sends_no_control_characters_of_a_plan(tmp_path):
    fields = json.loads((PLANS / "h200x4-vm.json").read_text())
    for name, value in (("recommended", HOSTILE), (HOSTILE, 1), ("format_version", HOSTILE)):
        (tmp_path / "plan.json").write_text(json.dumps({**fields, name: value}))
        with pytest.raises(InputError) as error:
            load_plan(tmp_path)
        assert all(line.isprintable() for line in str(error.value).split("\n"))
    error = MeasurementError(f"{HOSTILE}and")
    assert str(error) == SHOWN.removesuffix("\\n") + "\nand"


@given(st.text() | st.sampled_from([HOSTILE, "\u2028\U000e0001é"]))
def test_json_has_no_characters_that_a_terminal_acts_on_and_says_the_same(text):
    written = encode_json([text])
    assert all(line.isprintable() for line in written.split("\n"))
    assert json.loads(written) == [text]


@pytest.mark.parametrize("text", [b'"a\xffb"', '"a\udcffb"'])
def test_json_outside_utf_8_is_a_sentence(text):
    with pytest.raises(InputError, match=r"^here: is not UTF-8 text; "):
        decode_json(text, str, where="here")


def test_tables_and_verdicts_show_control_characters_and_send_none(tmp_path):
    model = load_bundled("h200x4-vm")
    gpus = tuple(msgspec.structs.replace(gpu, name=HOSTILE) for gpu in model.machine.gpus)
    machine = msgspec.structs.replace(model.machine, name=HOSTILE, gpus=gpus)
    hostile = msgspec.structs.replace(model, machine=machine, name=HOSTILE, note=HOSTILE)
    box, graph = tmp_path / "box", tmp_path / f"graph{HOSTILE}"
    box.write_text(encode_json(hostile))
    graph.write_bytes(GRAPH.read_bytes())
    for arguments in (
        ("discover", box),
        ("measure", SET, "--simulate", box),
        ("validate", graph, *OF),
    ):
        result = tccl(*arguments)
        assert SHOWN in "".join(result.stdout.split())
        assert all(line.isprintable() for line in result.stdout.split("\n"))


def test_version_is_printed_also_of_a_checkout_that_is_not_installed(monkeypatch):
    assert tccl_py.__version__ == metadata.version("tccl-py")
    monkeypatch.setattr(metadata, "distribution", None)
    result = tccl("--version")
    assert (result.exit_code, result.stdout) == (0, f"tccl {tccl_py.__version__}\n")


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_2():
    result = tccl()
    assert result.exit_code == 2
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", NAMES_OF_ALL)
def test_help_has_an_example_and_no_unexplained_option(command):
    result = tccl(command, "--help")
    assert result.exit_code == 0
    assert f"tccl {command}" in result.stdout.split("Example", 1)[1]


def test_an_interrupt_ends_without_a_word(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("tccl_py.cli.machines.load_machine", interrupted)
    result = tccl("discover", "h200x4-vm")
    assert (result.exit_code, result.output) == (130, "")


WAITING = """
import time
from tccl_py.cli import machines, main

def wait(name):
    print("ready", flush=True)
    time.sleep(60)

machines.load_machine = wait
main.main()
"""


LOADING = """
import sys, time
waited_for = sys.argv.pop(1)

class Waiting:
    def find_spec(self, name, path=None, target=None):
        if name == waited_for:
            print("ready", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Waiting())
from tccl_py.__main__ import main
main()
"""


ENDING = """
import atexit, time
import tccl_py.cli.main
from tccl_py.__main__ import main

@atexit.register
def wait():
    print("ready", flush=True)
    time.sleep(60)

tccl_py.cli.main.main = lambda: None
main()
"""

MAKING_A_CLASS = """
import time
from tccl_py.cli import machines
from tccl_py.__main__ import main

class Waiting:
    def __set_name__(self, owner, name):
        print("ready", flush=True)
        time.sleep(60)

machines.load_machine = lambda name: type("Class", (), {"name": Waiting()})
main()
"""

INTERRUPTED = (
    {"a command": (WAITING, "discover", "h200x4-vm")}
    | {
        module: (LOADING, module, "plan", "--help")
        for module in ("tccl_py.children", "tccl_py.cli.main", "typer", "numpy", "tccl_py.cli.plan")
    }
    | {
        "the interpreter's end": (ENDING,),
        "a class in the making": (MAKING_A_CLASS, "discover", "h200x4-vm"),
    }
)


@pytest.mark.parametrize("moment", INTERRUPTED)
def test_a_signal_ends_the_process_without_a_trace_at_any_moment(moment):
    child = subprocess.Popen(
        [sys.executable, "-c", *INTERRUPTED[moment]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60) == ("", "")
    assert child.returncode == 130


def test_the_package_runs_as_the_command_does():
    command = [sys.executable, "-m", "tccl_py", "measure", "G0->G1", *ON]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert "'G0->G1': has 2" in result.stderr


FAILURES = {
    "a dependency that is missing": "sys.modules['typer'] = None",
    "a dependency that is broken": "sys.modules['msgspec'] = type(sys)('msgspec')",
    "a command that fails": "import tccl_py.simulator.model as m; m.figures_of = 1",
    "no memory": "import tccl_py.cli.main as m; m.app = lambda **_: bytearray(1 << 62)",
    "a pipe": "import tccl_py.cli.main as m\ndef app(**_): raise BrokenPipeError\nm.app = app",
    "standard error": "sys.stderr = None; sys.modules['typer'] = None",
}


def test_the_library_names_parameters_and_commands_but_no_bare_option():
    modules = (PLANS.parent / folder for folder in ("tccl_py", "profiler"))
    modules = [path for folder in modules for path in folder.rglob("*.py")]
    texts = [path.read_text() for path in modules if path.parent.name != "cli"]
    raised = [
        text.value
        for module in texts
        for error in ast.walk(ast.parse(module))
        if isinstance(error, ast.Raise) or ast.unparse(getattr(error, "func", error)) == "require"
        for text in ast.walk(error)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    ]
    assert len(raised) > 500
    bare = re.compile(r"^(?!.*\b(tccl|srun|mpirun) ).*--[a-z]")
    assert [text for text in raised if bare.search(text)] == []


def test_a_variable_in_a_flags_place_is_named_with_the_values_it_may_have(monkeypatch):
    monkeypatch.setenv("TCCL_ALIKE", "maybe")
    refused = tccl("env", "plan")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == "tccl: TCCL_ALIKE='maybe': is neither yes nor no; set it to 1 or 0\n"


def test_an_error_of_the_library_names_the_commands_option():
    error = tccl("measure", "--all-pairs", "--simulate", "amd-v100", "--gpus", "0").stderr
    assert error.startswith("tccl: --gpus: ")


def small_parts():
    model = load_bundled(SMALL)
    return model.machine, model.knowledge, tccl_py.Simulator(model)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: tccl_py.load_machine(3),
        lambda: tccl_py.load_plan(None),
        lambda: tccl_py.parse_set(3),
        lambda: tccl_py.parse_flow(None),
        lambda: tccl_py.Simulator("amd-v100"),
        lambda: tccl_py.open_source(3),
        lambda: tccl_py.make_plan(load_bundled("amd-v100"), None, None),
        lambda: tccl_py.make_cluster_plan(None, []),
        lambda: tccl_py.explain(None, []),
        lambda: tccl_py.write_plan(None, "plan"),
        lambda: tccl_py.diff(plan_of(SMALL), None),
        lambda: tccl_py.read_switches(3),
        lambda: tccl_py.cluster_of([None]),
        lambda: tccl_py.find_rings(None),
        lambda: tccl_py.drawing(None),
        lambda: tccl_py.open_source("amd-v100", noise="x"),
        lambda: tccl_py.open_source("amd-v100", seed=1.5),
        lambda: tccl_py.open_source("amd-v100", gpus=3),
        lambda: tccl_py.open_source("amd-v100", journal=3),
        lambda: tccl_py.search_problem(None, None, None, "fast"),
        lambda: tccl_py.open_source(backend="host", devices="2"),
        lambda: tccl_py.open_source(backend="host", options=3),
        lambda: tccl_py.make_plan(*small_parts(), gpus=["0", "1"]),
        lambda: tccl_py.make_plan(*small_parts(), budget=3),
        lambda: tccl_py.search_problem(*small_parts(), budget="x"),
        lambda: tccl_py.cluster_of([], switches=3),
        lambda: plan_of(SMALL).what_if((0, 1), ring="0"),
        lambda: plan_of(SMALL).subset(3),
        lambda: plan_of(SMALL).write(3),
        lambda: plan_of(SMALL).save(3),
        lambda: tccl_py.write_plan(plan_of(SMALL), 3),
    ],
)
def test_a_parameter_of_another_type_is_named(wrong):
    with pytest.raises(InputError, match=r"^`[a-z]+`: is of type "):
        wrong()


def cluster_of_two(**options):
    model = load_bundled("amd-v100")
    facts = {"machine": model.machine, "knowledge": model.knowledge}
    hosts = [tccl_py.HostReport(host=name, **facts) for name in "ab"]
    return tccl_py.cluster_of(hosts, **options), [tccl_py.Simulator(model)] * 2


def budgeted(**limits):
    return tccl_py.make_plan(*small_parts(), budget=tccl_py.Budget(**limits))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: budgeted(sets="x"), "`budget`: does not fit .*sets"),
        (lambda: budgeted(sets=0), "`budget`: does not fit .*sets"),
        (lambda: budgeted(seconds=math.nan), "`budget`: does not fit .*seconds"),
        (lambda: tccl_py.Flow("G0->G0->G1"), "`transfers`: .*`parse_flow`"),
        (lambda: tccl_py.TransferSet("G0->G0->G1"), "`flows`: .*`parse_set`"),
        (lambda: tccl_py.cluster_of([], rails="best"), "'best', one of any, only"),
        (lambda: plan_of(SMALL).write(Path(__file__).parent), "; name a new directory$"),
        (lambda: MeasurementOptions(repeats="x"), "`repeats`: is of type str; give int"),
        (lambda: MeasurementOptions(repeats=1), "`repeats`: is 1; 6 or more"),
        (lambda: MeasurementOptions(target=None), "`target`: is of type NoneType"),
        (lambda: tccl_py.make_cluster_plan(*cluster_of_two()), "are of other classes"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_would_be_right(wrong, sentence):
    with pytest.raises(InputError, match=sentence):
        wrong()


@pytest.mark.parametrize("case", FAILURES)
def test_an_exception_that_nobody_expects_is_no_answer(case):
    program = f"import sys\nimport tccl_py.__main__\n{FAILURES[case]}\ntccl_py.__main__.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "discover", "h200x4-vm"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["discover"]])
def test_a_program_that_is_not_installed_says_so_in_one_sentence(arguments):
    # Without site packages, as in a folder that was only copied.
    line = [sys.executable, "-S", "-E", "-m", "tccl_py", *arguments]
    done = subprocess.run(
        line, cwd=Path(tccl_py.__file__).parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.fullmatch(r"tccl: No module named '\w+'; run `pip install .*\n", done.stderr)


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        result = process("discover", "h200x4-vm", stdout=gone)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [("discover", "h200x4-vm"), ("--help",), ("--version",)])
def test_a_full_disk_behind_stdout_is_one_sentence(arguments):
    with Path("/dev/full").open("w") as full:
        result = process(*arguments, stdout=full)
    assert result.returncode == 2
    assert result.stderr.startswith("tccl: standard output: ")
    assert "space left on device" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_name_that_is_not_utf_8_is_one_sentence(tmp_path):
    path = tmp_path / os.fsdecode(b"box\xff.xml")
    path.write_bytes(TOPOLOGY.read_bytes())
    result = process("discover", "--nccl-topology", str(path))
    assert (result.returncode, result.stdout) == (2, "")
    assert "UTF-8; rename the file" in result.stderr


def test_a_machine_is_a_name_a_model_a_machine_or_a_topology(tmp_path):
    model = load_bundled("h200x4-vm")
    (tmp_path / "model.json").write_text(encode_json(model))
    (tmp_path / "machine.json").write_text(encode_json(model.machine))
    assert load_machine("h200x4-vm") == model
    assert load_machine(str(tmp_path / "model.json")) == model
    assert load_machine(str(tmp_path / "machine.json")).machine == model.machine
    assert len(load_machine(str(TOPOLOGY)).machine.gpus) == 4


def test_a_bundled_name_comes_before_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h200x4-vm").write_text(encode_json(toy_machine(gpus=2)))
    assert len(load_machine("h200x4-vm").machine.gpus) == 4
    assert len(load_machine("./h200x4-vm").machine.gpus) == 2


def test_gpu_lists_keep_the_order_given():
    assert parse_gpus("5, 0-2,7") == (5, 0, 1, 2, 7)
    assert gpus_argument(None, toy_machine(gpus=2)) is None


@pytest.mark.parametrize(
    "text", ["", ",", "1,", "-1", "1-", "3-1", "0-64", "1,1", "0x1", "1e1", "٣"]
)
def test_other_gpu_lists_are_refused(text):
    with pytest.raises(InputError, match=r"^GPU list "):
        parse_gpus(text)


def test_every_figure_has_its_mark():
    assert provenance(simulated=False, assumed=False) == "measured"
    assert provenance(simulated=True, assumed=False) == "simulated"
    assert provenance(simulated=True, assumed=True) == "simulated from assumed values"


LOADED = """
import sys
from tccl_py.__main__ import main

try:
    main()
finally:
    heavy = ["numpy", "scipy", "networkx", "torch", "rich", "tccl_profiler"]
    heavy += ["typer"] * (sys.argv[1:] == ["--version"])
    print(*(name for name in heavy if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [("--version",), ("env", "{}")])
def test_the_start_of_a_job_loads_no_numerical_library(arguments, tmp_path):
    # A plan whose machine has links that its description hides.
    name = "asus-esc8000a-e13p"
    write_plan(load_plan(PLANS / f"{name}.json"), tmp_path, models=as_only(load_bundled(name)))
    words = [word.format(tmp_path) for word in arguments]
    result = subprocess.run(
        [sys.executable, "-c", LOADED, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "\n")


@pytest.mark.parametrize("command", NAMES_OF_ALL)
def test_the_text_of_a_commands_help_before_its_examples_is_short(command):
    text = getdoc(load_command(command).callback)
    assert len(text.split("Example")[0].split()) <= 70


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.commands}: {rule.options}")
def test_rules_between_options_name_what_their_commands_have(rule):
    others = {*(rule.needs or rule.excludes).split()}
    known = {}
    for name in rule.commands.split():
        params = load_command(name).params
        arguments = {(param.metavar or "").strip("[].") for param in params}
        known[name] = arguments.union(*(param.opts for param in params))
        assert known[name] & {*rule.options.split()} and known[name] & others
    assert {*rule.options.split(), *others} <= set().union(*known.values())
    assert bool(rule.needs) != bool(rule.excludes)


def test_a_plans_help_has_ten_options_and_the_others_follow_on_request():
    text = tccl("plan", "--help").stdout
    assert 1 < text.count("│ --") <= 10
    first, advanced = tccl("plan", "--help-all").stdout.split("╭─ Advanced", 1)
    assert first.count("│ --") == text.count("│ --")
    assert advanced.count("│ --") > 8


def test_the_help_begins_with_the_commands_to_start_with_and_no_flag_has_a_metavar():
    text = tccl("--help").stdout
    assert re.findall("╭─ ([A-Z][a-z ]+?) ─", text) == ["Start here", "Look", "Use"]
    assert "--version" in text
    assert "<bool>" not in "".join(tccl(name, "--help-all").stdout for name in NAMES_OF_ALL)


def test_verbose_shows_where_an_error_comes_from():
    assert "Traceback" not in tccl("measure", "G0", *ON).stderr
    assert "Traceback" in tccl("measure", "-v", "G0", *ON).stderr
    assert "Traceback" in tccl("-v", "measure", "G0", *ON).stderr


def test_the_verbosity_of_a_command_ends_with_it():
    tccl("-q", "discover")
    assert "newer than" in tccl("validate", GRAPH, *OF, "--nccl", "2.33").stderr


def search(rings, best, bound):
    progress = Progress(rings_in_set=rings, sets_measured=1, best_gbps=best, bound_gbps=bound)
    return lambda line: line(progress)


def count(sets):
    return lambda line: line.count_sets(sets)


@pytest.mark.parametrize(
    ("limits", "clock", "steps", "said"),
    [
        (
            (10,),
            [0.0, *(9.0 + 3 * step for step in range(30))],
            [search(4, 2.0, 3.0), *map(count, range(6))],
            [
                "bound of this search 3.0; 0 sets",
                "2 of at most 10 sets, at most",
                "36 s left at this pace$",
            ],
        ),
        # What passed before the first set is no part of the pace.
        (
            (100,),
            [0.0, 12.0, 12.0, 24.0, 24.0],
            [count(1), count(13)],
            ["1 of at most 100 sets$", "13 of at most 100 sets, at most 1:27 left at this pace$"],
        ),
        # The bound of a later search is not shown below the best so far.
        (
            (),
            [0.0, 11.0, 22.0],
            [search(1, 4.0, 5.0), search(2, 2.0, 3.0)],
            ["bound of this search 5.0$", "best so far 4.0 GB/s, bound of this search [?]$"],
        ),
        # The time left is no more than the limit of seconds leaves.
        (
            (1000, 26.0),
            [0.0, 11.0, 11.0, 25.0, 25.0, 40.0, 40.0],
            [count(5), count(6), count(7)],
            ["sets, at most 15 s left$", "sets, at most 1 s left$", "7 of at most 1000 sets$"],
        ),
    ],
)
def test_a_pipe_gets_progress_in_lines_every_ten_seconds(
    limits, clock, steps, said, monkeypatch, capsys
):
    times = iter(clock)
    monkeypatch.setattr("tccl_py.cli.output.time.monotonic", lambda: next(times))
    with ProgressLine(*limits) as line:
        for step in steps:
            step(line)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said), lines
    assert all(re.search(words, text) for words, text in zip(said, lines, strict=True)), lines


@pytest.mark.parametrize("columns", ["40", "80"])
def test_help_shows_whole_names_of_options_in_narrow_terminals_too(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    shown = tccl("plan", "--help-all").stdout
    # Examples stay whole, to be copied.
    lines = [line for line in shown.splitlines() if " tccl plan " not in line]
    assert max(map(len, lines)) <= int(columns)
    assert re.search("^\\W*--gpus-per-job +LIST", shown, flags=re.MULTILINE)


def test_columns_of_numbers_are_aligned_to_the_right_and_piped_lines_end_in_no_space(capsys):
    mixed, widths = ("1", "2 (slowest)"), ("\u00b1 0.5%", "?")
    rows = [("a", "1.5", "0 1", mixed[0], widths[0]), ("b", "10.5", "2", mixed[1], widths[1])]
    print_table(results(), [("name", "GB/s", "order", "mixed", "interval"), *rows])
    results().print(grid([("fact", "x" * 150)]))
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert "a    \u2502  1.5 \u2502 0 1   \u2502 1           \u2502   \u00b1 0.5%" in "\n".join(
        lines
    )
    assert "b    \u2502 10.5 \u2502 2     \u2502 2 (slowest) \u2502        ?" in "\n".join(lines)


def test_verdicts_have_colours_on_a_terminal_alone(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    line = ("validate", GRAPH, *OF)
    assert "\x1b[" in tccl(*line).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in tccl(*line).stdout
