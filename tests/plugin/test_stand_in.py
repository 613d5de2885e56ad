"""The plugin under a stand-in for NCCL that plays what NCCL was recorded to ask."""

import ctypes
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tccl_py import nccl_library
from tccl_py.nccl.plugin.build import SOURCES, build_plugin
from tccl_py.nccl.plugin.index import IndexedGpu
from tccl_py.nccl.versions import FIRST_WITH_PLUGIN, LAST_WITH_PLUGIN
from tests.plugin import runs
from tests.plugin.programs import (
    RECORDS,
    StandIn,
    compile_program,
    expected_answers,
    file_answer,
    fuzz,
    random_script,
    stand_in_plan,
)
from tests.plugin.runs import make_plan
from tests.skips import needs

PAIR = [("comm", 7, (0, 1))]
SCRIPT = random_script(5, 40)
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}[platform.machine()]
FORBID = """
import ctypes, os, struct, sys
from tests.skips import needs
steps = (0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)
filter = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(filter))
assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0
assert ctypes.CDLL(None).prctl(22, 2, program) == 0
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a command that may not make a system call: a seccomp filter answers EPERM."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stand-in")


@pytest.fixture(scope="module")
def plan(folder):
    return stand_in_plan(folder / "plan")


@pytest.fixture(scope="module")
def plain(folder):
    return StandIn(folder)


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
@pytest.mark.parametrize("sanitizer", ["", "address", "thread"])
def test_random_communicators_of_eight_threads_get_their_files(folder, plan, sanitizer, version):
    script = random_script(len(sanitizer), 150)
    found = StandIn(folder, sanitizer).run(plan, script, version=version)
    assert found == expected_answers(plan, script)


@pytest.mark.parametrize("version", ["2.28.9", "2.30.7"])
def test_threads_prefer_the_planned_node_for_the_proxy_alone(tmp_path, plain, version):
    libc, preferred, default = ctypes.CDLL(None), 1, 0
    if libc.syscall(SET_MEMPOLICY, preferred, ctypes.byref(ctypes.c_ulong(1)), 65) != 0:
        pytest.skip("this host forbids memory policies")
    libc.syscall(SET_MEMPOLICY, default, None, 0)
    plan = stand_in_plan(tmp_path, nodes=dict.fromkeys(range(8), 0), missing=((0, 1), (2, 3, 5)))
    script = random_script(11, 120)
    plain.run(plan, script, version=version)
    answers = expected_answers(plan, script)
    assert plain.nodes == {key: 0 if size else -1 for key, (size, _) in answers.items()}


def test_hosts_that_forbid_memory_policies_get_graph_files_all_the_same(tmp_path, plain):
    plan = stand_in_plan(tmp_path, gpus=2, nodes={0: 0, 1: 0})
    wrapper = [sys.executable, "-c", FORBID, str(SET_MEMPOLICY)]
    assert plain.run(plan, PAIR, wrapper=wrapper, TCCL_DEBUG="1") == expected_answers(plan, PAIR)
    assert set(plain.nodes.values()) == {-1}
    assert plain.said.count("set_mempolicy: Operation not permitted") == 2


def test_a_limit_on_the_size_of_files_kills_no_rank(plan, plain):
    wrapper = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh"]
    found = plain.run(plan, PAIR, wrapper=wrapper, TCCL_DEBUG="1")
    assert set(found.values()) == {(0, 0)} and "files of 0 bytes" in plain.said


def test_ranks_decide_alike_where_nccl_has_no_barrier_before_its_question(folder, plan, plain):
    slow = compile_program(folder, "slow_read", "-shared", "-fPIC", target="slow_read.so")
    racy = [("racy", number + 1, (0, 1)) for number in range(500)]
    found = plain.run(plan, racy, LD_PRELOAD=str(slow))
    answers = [{found[number, rank] for rank in ranks} for _, number, ranks in racy]
    assert all(len(answer) == 1 for answer in answers)


def test_a_signal_while_a_file_is_made_takes_no_graph_file_away(folder, plan, plain):
    signals = compile_program(folder, "interrupted", "-shared", "-fPIC", target="interrupted.so")
    found = plain.run(plan, SCRIPT, LD_PRELOAD=str(signals))
    assert found == expected_answers(plan, SCRIPT)


def test_a_rank_whose_nccl_keeps_the_number_of_ranks_elsewhere_leaves_all_ranks_default(
    plan, plain
):
    found = plain.run(plan, [("blind", 5, (0, 1, 2)), ("comm", 6, (0, 1, 2))])
    assert {found[5, rank] for rank in range(3)} == {(0, 0)} != {found[6, 0]}


QUESTIONS = ("net", "env NCCL_TOPO_DUMP_FILE", "env NCCL_GRAPH_FILE", "env NCCL_ALGO")


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))][1:], ids=str)
def test_ranks_get_the_same_from_an_nccl_that_asks_in_another_order(tmp_path, plan, plain, order):
    asked = {name: QUESTIONS[at] for name, at in zip(QUESTIONS, order, strict=True)}
    lines = (RECORDS / "asked-by-2.30.7.txt").read_text().splitlines()
    (tmp_path / "record.txt").write_text("".join(f"{asked.get(each, each)}\n" for each in lines))
    script = [("comm", number + 1, ranks) for number, (_, _, ranks) in enumerate(SCRIPT)]
    found = plain.run(plan, script, record=tmp_path / "record.txt")
    for _, number, ranks in script:
        answers = {found[number, rank] for rank in ranks}
        assert len(answers) == 1
        whole = tuple(sorted(ranks)) in plan.orders
        assert answers <= {(0, 0), file_answer(plan, ranks) if whole else (0, 0)}


GIVEN = {"nccl": "2.30", "given": {"NCCL_BUFFSIZE": "524288"}}
NEEDED = {"NCCL_COMM_SPLIT_SHARE_RESOURCES": "0"}


def test_a_value_of_the_users_own_stays_beside_a_graph_file(tmp_path, plain):
    plan = stand_in_plan(tmp_path, needed=NEEDED, **GIVEN)
    assert plain.run(plan, PAIR, **NEEDED) == expected_answers(plan, PAIR)
    assert set(plain.buffers.values()) == {"524288"}
    assert plain.run(plan, PAIR, NCCL_BUFFSIZE="4096", **NEEDED) == expected_answers(plan, PAIR)
    assert set(plain.buffers.values()) == {"4096"}


@pytest.mark.parametrize("sanitizer", ["", "thread"])
def test_all_ranks_get_default_nccl_once_a_process_has_two_releases(folder, tmp_path, sanitizer):
    plan, program = stand_in_plan(tmp_path, needed=NEEDED, **GIVEN), StandIn(folder, sanitizer)
    script = [("early", 7, (0, 1)), ("comm", 8, (0, 1, 2))]
    found = program.run(plan, script, TCCL_DEBUG="1", **NEEDED)
    assert set(found.values()) == {(0, 0)} and set(program.buffers.values()) == {"-"}
    assert program.said.count("this process has two releases of NCCL, 2.30.7 and 2.28.9\n") == 1
    reasons = re.findall(r"(\d of \d): default NCCL: rank \d: its process has two", program.said)
    assert sorted(reasons) == ["0 of 2", "0 of 3", "1 of 2", "1 of 3", "2 of 3"]


@pytest.mark.parametrize("sanitizer", ["", "thread"])
def test_all_ranks_of_a_begun_communicator_get_the_plan_where_another_release_starts(
    folder, tmp_path, sanitizer
):
    plan, program = stand_in_plan(tmp_path, needed=NEEDED, **GIVEN), StandIn(folder, sanitizer)
    found = program.run(plan, [("amid", 7, (0, 1)), ("comm", 8, (0, 1, 2))], **NEEDED)
    own = {(7, rank): file_answer(plan, (0, 1)) for rank in range(2)}
    assert found == own | {(8, rank): (0, 0) for rank in range(3)}
    assert program.buffers == {key: "524288" if key in own else "-" for key in found}


def test_a_tuner_goes_by_the_first_release_where_another_one_starts(tmp_path, plain):
    library = ctypes.CDLL(shutil.copy(plain.plugin, tmp_path / "own-statics.so"))
    start = function_of(library, "ncclEnvPlugin_v1", 1)
    choose = function_of(library, "ncclTunerPlugin_v5", 2)
    told = (ctypes.c_int * 4).in_dll(library, "tccl_told")
    costs, channels, size = (ctypes.c_float * 21)(*[1.0] * 21), ctypes.c_int(0), 1 << 20
    for release in ((2, 30, 7), (2, 28, 9)):
        start(*release, b"")
        told[:] = [1, 2, 8, 0]  # ring, simple, 8 channels; and the calls that got them
        choose(None, 2, ctypes.c_size_t(size), 1, costs, 7, 3, 0, ctypes.byref(channels))
        # From 2.29 on no all-gather gets channels.
        assert (told[3], channels.value) == (0, 0)


def function_of(library, struct, place):
    """Return a function of a plugin's struct, by its place there."""
    pointers = (ctypes.c_void_p * (place + 1)).in_dll(library, struct)
    return ctypes.CFUNCTYPE(ctypes.c_int)(pointers[place])


@pytest.mark.parametrize("version", ["2.28.3", "2.33.0"])
def test_a_release_that_was_not_tried_gets_default_nccl(plan, plain, version):
    assert set(plain.run(plan, PAIR, release=version).values()) == {(0, 0)}
    for newest in ("2.33.0", "2.33.1", "2.32.9", "1", "2.33", "2.33.0x"):
        found = plain.run(plan, PAIR, release=version, TCCL_NEWER_NCCL=newest)
        allowed = version == "2.33.0" and newest in ("2.33.0", "2.33.1")
        assert (set(found.values()) != {(0, 0)}) == allowed


def test_one_tuner_has_the_interfaces_of_all_releases(plain):
    library = ctypes.CDLL(str(plain.plugin))
    places = (ctypes.c_char.in_dll(library, f"ncclTunerPlugin_v{number}") for number in (5, 6, 7))
    assert len(set(map(ctypes.addressof, places))) == 1


def test_the_installed_nccl_is_judged_though_tests_see_none():
    assert runs.installed_nccls is not nccl_library.installed_nccls


def test_python_and_the_plugin_know_the_same_releases():
    text = (SOURCES / "process.c").read_text()
    first, last = (int(re.search(rf"{name}_NCCL = (\d+)", text)[1]) for name in ("FIRST", "LAST"))
    assert first == sum(
        part * unit for part, unit in zip(FIRST_WITH_PLUGIN, (10000, 100, 1), strict=True)
    )
    assert last == LAST_WITH_PLUGIN[0] * 10000 + LAST_WITH_PLUGIN[1] * 100 + 99


def test_nothing_is_left_in_shared_memory(plan, plain):
    plain.run(plan, [*random_script(3, 40), ("failed", 9, (2, 3))])
    assert not Path(f"/dev/shm/tccl-{os.geteuid()}/0000000000000009").exists()


def test_a_board_of_killed_ranks_is_not_taken_for_a_new_one(plan, plain):
    board = Path(f"/dev/shm/tccl-{os.geteuid()}/0000000000000007")
    board.parent.mkdir(mode=0o700, exist_ok=True)
    board.write_bytes(bytes(104))
    assert plain.run(plan, PAIR) == expected_answers(plan, PAIR)
    assert not board.exists()


FOLDER = f"/dev/shm/tccl-{os.geteuid()}"


@pytest.mark.parametrize(
    ("script", "usable"),
    [
        ("umask 0177", True),
        ("umask 0777", True),
        (f"mkdir -m 0 {FOLDER}", True),
        (f"mkdir -m 2755 {FOLDER}", True),
        ("chmod g+s /dev/shm", True),
        (f"touch {FOLDER}", False),
        (f"mkdir {FOLDER}; chown 12345 {FOLDER}", False),
    ],
)
def test_a_folder_is_used_if_it_is_the_users_own_whatever_its_mode(plan, plain, script, usable):
    command = f'mount -t tmpfs -o mode=1777 none /dev/shm && {script}; exec "$@"'
    wrapper = ["unshare", "-m", "sh", "-c", command, "sh"]
    if subprocess.run([*wrapper, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user cannot make mount namespaces")
    found = plain.run(plan, PAIR, wrapper=wrapper, TCCL_DEBUG="1")
    assert found == (expected_answers(plan, PAIR) if usable else dict.fromkeys(found, (0, 0)))
    assert (f"{FOLDER}: another user made it, who or root can remove it" in plain.said) != usable


@pytest.mark.parametrize(
    "variables",
    [
        {"TCCL_DISABLE": "1"},
        {"NCCL_GRAPH_FILE": "/dev/null"},
        {"NCCL_COMM_ID": "127.0.0.1:1"},
        {"TCCL_INDEX": "/nowhere"},
        {"TCCL_INDEX": ""},
        {"TCCL_INDEX": "plugin.index"},
    ],
)
def test_default_nccl_where_the_user_says_so(plan, plain, variables):
    found = plain.run(plan, PAIR, **variables)
    assert {size for size, _ in found.values()} == {0}


def spoil(folder, how):
    index, graph = folder / "plugin.index", folder / "subsets" / "graph-0-1.xml"
    match how:
        case "link":
            index.rename(folder / "other")
            index.symlink_to(folder / "other")
        case "fifo":
            index.unlink()
            os.mkfifo(index)
        case "folder":
            index.unlink()
            index.mkdir()
        case "graph is a fifo":
            graph.unlink()
            os.mkfifo(graph)
        case "graph is a link":
            graph.rename(folder / "other")
            graph.symlink_to(folder / "other")
        case "others write":
            index.chmod(0o646)
        case "group writes":
            folder.chmod(0o770)
        case "cut":
            index.write_bytes(index.read_bytes()[:-4])
        case "too large":
            with index.open("ab") as file:
                file.truncate(2 << 20)
        case "another user's":
            os.chown(index, 12345, 12345)


@pytest.mark.parametrize(
    "how",
    [
        "link",
        "fifo",
        "folder",
        "graph is a fifo",
        "graph is a link",
        "others write",
        "group writes",
        "cut",
        "too large",
        "another user's",
    ],
)
def test_files_that_are_not_trusted_mean_default_nccl(tmp_path, plain, how):
    if how.startswith("another"):
        needs("root")
    plan = stand_in_plan(tmp_path / "plan", gpus=2)
    wanted = file_answer(plan, (0, 1))
    assert set(plain.run(plan, PAIR).values()) == {wanted}
    spoil(plan.folder, how)
    assert set(plain.run(plan, PAIR).values()) == {(0, 0)}


@pytest.mark.parametrize("own", [True, False])
def test_uuids_tell_gpus_apart(tmp_path, plain, own):
    buses = {gpu: f"0000:{16 + gpu:02x}:00.0" for gpu in range(2)}
    uuids = {gpu: f"{gpu + 1:02x}" * 16 for gpu in buses}
    if not own:
        uuids[1] = "ff" * 16
    gpus = tuple(IndexedGpu(nvml=gpu, bus_id=buses[gpu], uuid=uuid(uuids[gpu])) for gpu in buses)
    plan = make_plan(tmp_path / "plan", buses=buses, gpus=gpus, simulated=False)
    wanted = file_answer(plan, (0, 1)) if own else (0, 0)
    assert set(plain.run(plan, PAIR).values()) == {wanted}


def uuid(digits):
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return f"GPU-{'-'.join(parts)}"


@pytest.mark.parametrize(
    "kind", ["index", "index job", "board", "board job", "tuner", "tuner wide"]
)
def test_mutated_files_boards_and_cost_tables_break_nothing(folder, kind):
    count = {"index": 1500, "board": 60_000, "tuner": 100_000}[kind.split()[0]]
    assert fuzz(folder, kind, count, seed=5).startswith(f"{count} ")


def test_the_library_loads_where_glibc_is_old(tmp_path):
    needs("objdump")
    library = build_plugin(tmp_path)
    table = subprocess.run(
        ["objdump", "-T", library], capture_output=True, text=True, check=True
    ).stdout
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", table)}
    assert max(versions) <= (2, 17)
    exported = {line.split()[-1] for line in table.splitlines() if re.search(r" g +DO ", line)}
    names = {"Env": (1, 2), "Net": (11, 12), "Tuner": (5, 6)}
    assert {f"nccl{kind}Plugin_v{n}" for kind, found in names.items() for n in found} < exported
    assert "ncclProfiler_v5" in exported
