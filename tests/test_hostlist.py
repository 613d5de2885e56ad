"""Lists of hosts: what launchers write, SLURM's expressions, and what is neither."""

import string
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.model.cluster import MAX_NAME, check_host_name, check_host_names, class_name, compress
from tccl_py.readers.hosts import (
    MAX_BYTES,
    MAX_HOSTS,
    HostSlots,
    expand,
    listed_hosts,
    parse_host_list,
    read_host_list,
)
from tests.effort import calls_at_most


def refused(call, *parts: str) -> str:
    """The sentence by which `call` is refused; `parts` must be in it."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert text.isprintable() and len(text) < 400
    for part in parts:
        assert part in text
    return text


def hosts(text: str) -> dict[str, int | None]:
    return {one.name: one.slots for one in parse_host_list(text, where="hosts")}


# Names

FIRST = string.ascii_letters + string.digits + "_"
names = st.builds(
    "".join, st.tuples(st.sampled_from(FIRST), st.text(alphabet=FIRST + ".-", max_size=12))
)


@pytest.mark.parametrize("name", ["a", "node1", "gpu-01.cluster_2", "010", "A" * MAX_NAME, "_x"])
def test_names_that_can_name_a_host(name):
    assert check_host_name(name, where="here") == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "-n", ".ssh", "a/b", "a b", "a\n", "nöde", "a:1", "fe80::1", "\u0661"),
        *("x\x1b[31m", "../../etc", "$(id)", "a;b", "A" * (MAX_NAME + 1), "a" * 100_000),
    ],
)
def test_names_that_cannot(name):
    refused(lambda: check_host_name(name, where="here"), "here: ")


def test_a_name_is_doubled():
    refused(lambda: check_host_names(["a", "b", "a"], where="job"), "job: names host a twice")


@settings(max_examples=40)
@given(st.text(max_size=100), st.sets(names, max_size=4))
def test_class_names_are_fit_and_new(text, taken):
    name = class_name(text, taken)
    assert name not in taken
    check_host_name(name, where="class")
    assert class_name(text, {*taken, name}) != name


# Expressions


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("", ""),
        ("login1", "login1"),
        ("gpu[001-003,020],login1", "gpu001 gpu002 gpu003 gpu020 login1"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11]", "n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[1-010]", "n1 n2 n3 n4 n5 n6 n7 n8 n9 n10"),
        ("n[3,1,2]", "n3 n1 n2"),
        ("r[1-2]n[0-1]", "r1n0 r1n1 r2n0 r2n1"),
        ("r[1-2]n[0-1]-ib", "r1n0-ib r1n1-ib r2n0-ib r2n1-ib"),
        ("[10-11]", "10 11"),
        ("a, b\tc\n d", "a b c d"),
        ("a,,b,", "a b"),
        ("n1,n1", "n1 n1"),
    ],
)
def test_expressions(expression, expected):
    assert " ".join(expand(expression)) == expected


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        ("n[0-999999999]", "more than"),
        ("n[0-999999999999999999]", "more than"),
        ("n[1-9999]m[1-9999]", "more than"),
        ("n[1-65536],m", "more than"),
        ("n" + "[0-9]" * 40, "more than"),
        ("n" + "[0-999999999999999999]" * 100_000, "parts"),
        ("n[" + "1," * 100_000 + "1]", "more than"),
        ("n[5-3]", "goes down"),
        ("n[]", "no range"),
        ("n[1-]", "no range"),
        ("n[-1]", "no range"),
        ("n[1--2]", "no range"),
        ("n[1-2-3]", "no range"),
        ("n[a-b]", "no range"),
        ("n[1, 2]", "no range"),
        ("n[\u0663]", "no range"),
        ("n[0x1-0x2]", "no range"),
        ("n[" + "9" * 5000 + "]", "no range"),
        ("n[1-[2-3]]", "do not match"),
        ("n[1", "do not match"),
        ("n1]", "do not match"),
        ("n[" * 50_000, "do not match"),
        ("-n[1-2]", "cannot be a name"),
        ("n[1-2]/x", "cannot be a name"),
        ("n\x00", "cannot be a name"),
        ("n[1]" * 20 + "a" * 300, "characters"),
    ],
)
def test_expressions_that_are_refused(expression, part):
    with calls_at_most(17_000_000):
        refused(lambda: expand(expression, where="list:3"), "list:3: ", part)


def test_the_largest_expression_takes_few_calls():
    with calls_at_most(1_000_000):
        assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS


numbered = st.builds(
    "{}{:0{}d}".format, st.sampled_from(["n", "gpu-", "r1n", "", "x.", "0"]), st.integers(0, 120),
    st.integers(1, 4),
)  # fmt: skip


@example(["n", "n0"])
@example(["n0", "n"])
@given(st.lists(st.one_of(numbered, names), max_size=40))
def test_compressing_and_expanding_is_the_same_list(listed):
    assert expand(compress(listed)) == tuple(listed)


@given(st.integers(0, 2000), st.integers(1, 300), st.integers(1, 6))
def test_hosts_in_a_row_are_one_range(first, count, width):
    listed = [f"n{number:0{width}d}" for number in range(first, first + count)]
    text = compress(listed)
    assert expand(text) == tuple(listed)
    assert "," not in text


@given(st.text(alphabet="n[]-,0123 :*x", max_size=30))
def test_any_text_is_expanded_or_refused(text):
    try:
        found = expand(text)
    except InputError:
        return
    assert check_host_names(dict.fromkeys(found), where="x") == tuple(dict.fromkeys(found))


# Files


def test_open_mpi_hostfile():
    text = """\
# the job's hosts
node3 slots=8
node1 slots = 4 max_slots=16  # fewer
node2\tcount=2
user@node4  cpu=1 port=22\r
"""
    assert parse_host_list(text, where="hosts") == (
        HostSlots("node3", 8),
        HostSlots("node1", 4),
        HostSlots("node2", 2),
        HostSlots("node4", 1),
    )


# What `prterun --display allocation` of Open MPI 5.0.11 (PRRTE 3.0.14) says of the same files.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a slots=2\na\nb\nb\n", {"a": 3, "b": 2}),
        ("a max_slots=3\n", {"a": None}),
        ("user@a slots = 2 # x\n", {"a": 2}),
        ("a slots=2\na slots=2\n", None),
        ("a\na slots=2\n", None),
    ],
)
def test_lines_of_a_host_count_as_in_open_mpi(text, expected):
    if expected is None:
        refused(lambda: hosts(text), "hosts:")
    else:
        assert hosts(text) == expected


def test_machinefile_plain_list_and_expressions():
    assert hosts("node1:8\nnode2:4 # last\n") == {"node1": 8, "node2": 4}
    assert hosts("node1:2 binding=rr user=me\nnode1:3\n") == {"node1": 5}
    assert hosts("node2\nnode1\n\n") == {"node2": None, "node1": None}
    assert hosts("node2\nnode2\nnode1\n") == {"node2": 2, "node1": None}
    assert hosts("gpu[1-2]:8,login1*2") == {"gpu1": 8, "gpu2": 8, "login1": 2}
    assert hosts("gpu[1-2] slots=4") == {"gpu1": 4, "gpu2": 4}
    assert hosts("b,a,b") == {"b": 2, "a": None}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["names no host"]),
        ("# nothing\n\n", ["names no host"]),
        ("a\nb c\n", ["hosts:2", "'c'"]),
        ("a slots 8\n", ["hosts:1", "'slots'"]),
        ("a slots=0\n", ["hosts:1", "slots=0"]),
        ("a slots=-1\n", ["hosts:1", "slots=-1"]),
        ("a slots=eight\n", ["hosts:1", "slots=eight"]),
        ("a slots=99999999999999999999\n", ["hosts:1"]),
        ("a slots=5000\n", ["hosts:1"]),
        ("a gpus=8\n", ["hosts:1", "gpus=8"]),
        ("a:0\n", ["hosts:1", "0 slots"]),
        ("a:100000\n", ["hosts:1"]),
        ("a:9999999\n", ["hosts:1"]),
        (":8\n", ["hosts:1", "names no host"]),
        (",\n", ["hosts:1", "names no host"]),
        ("user@\n", ["hosts:1", "names no host"]),
        ("^a\n", ["hosts:1", "allocation"]),
        ("+n1\n", ["hosts:1", "allocation"]),
        ("fe80::1\n", ["hosts:1"]),
        ("x" * 5000, ["hosts:1"]),
        ("a\n\x1b]0;owned\x07\n", ["hosts:2"]),
        ("n[0-999999999]\n", ["hosts:1", "more than"]),
        ("SwitchName=s1 Nodes=a\n", ["hosts:1"]),
        ("{\n", ["hosts:1"]),
        ('{"hosts": ["a"]}', ["hosts:1"]),
    ],
)
def test_lists_that_are_refused(text, parts):
    refused(lambda: hosts(text), *parts)


def test_many_large_lines_are_refused_with_few_calls():
    with calls_at_most(22_000_000):
        refused(lambda: hosts("n[1-65536]\n" * 100_000), "more than")


@pytest.mark.parametrize("piece", ["a,", "ab ", "a=", "n[1]", "a\n", " "])
def test_large_files_of_any_shape_take_a_few_times_their_size(piece):
    text = piece * (MAX_BYTES // 2 // len(piece))
    tracemalloc.start()
    with calls_at_most(400_000), pytest.raises(InputError):
        hosts(text + "b")
    assert tracemalloc.get_traced_memory()[1] < 4 * MAX_BYTES
    tracemalloc.stop()


def test_a_list_of_ten_thousand_hosts_is_read_with_few_calls(tmp_path: Path):
    path = tmp_path / "hosts"
    path.write_text("".join(f"gpu{n:05d} slots=8\n" for n in range(10_000)))
    with calls_at_most(1_200_000):
        assert len(read_host_list(path)) == 10_000


def test_a_list_may_be_longer_than_the_name_of_a_file():
    assert len(listed_hosts(",".join(f"gpu{n}" for n in range(2_000)), where="hosts")) == 2_000


def test_a_list_on_the_command_line_names_each_host_once():
    refused(lambda: listed_hosts("a,b,a", where="--hosts"), "--hosts: names 'a' twice")
    assert [host.slots for host in listed_hosts("a:2,b", where="--hosts")] == [2, None]


def test_files_that_cannot_be_read(tmp_path: Path):
    large = tmp_path / "large"
    with large.open("wb") as handle:
        handle.truncate(MAX_BYTES + 1)
    refused(lambda: read_host_list(large), "large: is larger than")
    refused(lambda: read_host_list(tmp_path / "none"), "none: cannot be read")
    refused(lambda: read_host_list(tmp_path), "is a directory")
    (tmp_path / "bytes").write_bytes(b"a\xff\n")
    refused(lambda: read_host_list(tmp_path / "bytes"), "UTF-8")


@given(st.text(alphabet="ab1:*=,[]-# \n@^+slotrank", max_size=60))
def test_any_text_is_a_list_or_refused(text):
    try:
        found = parse_host_list(text, where="hosts")
    except InputError as error:
        assert str(error).isprintable()
        return
    assert found
    check_host_names((one.name for one in found), where="hosts")
