"""Each check of the plugin has what it refuses: its functions, from a library that shows them."""

import ctypes
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import pytest

from tccl_py.nccl.plugin.build import build_plugin
from tccl_py.nccl.plugin.index import digest
from tests.plugin.mixtures import Environment
from tests.plugin.programs import HERE
from tests.plugin.runs import make_plan, random_tables
from tests.skips import needs

GPUS, HOST, HASH, NCCL = 4, 5, 77, 23007
BUSES = {2 * gpu: f"0000:{16 + gpu:02x}:00.0" for gpu in range(GPUS)}
POST = struct.Struct("<8sQIIQIiiI32sQQQ")
FIELDS = ("hash", "rank", "ranks", "host", "refusal", "gpu", "nvml", "nccl", "digest", "tuned")
RULES = {
    "needed": {"NCCL_P2P_LEVEL": "SYS"},
    "given": {"NCCL_BUFFSIZE": "131072"},
    "must": {"NCCL_ALGO": "Ring"},
    "forbid": ("NCCL_CROSS_NIC", "NCCL_SHM_DISABLE"),
}


class Set(ctypes.Structure):
    _fields_ = (("gpus", ctypes.c_uint64), ("name", ctypes.c_char_p))


class Decision(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.POINTER(Set)),
        ("table", ctypes.POINTER(ctypes.c_uint64)),
        ("nvml", ctypes.c_int * 64),
        ("why", ctypes.c_char * 256),
    )


class Library:
    """A copy of the library with statics of its own."""

    def __init__(self, path):
        self._c, self._kept = ctypes.CDLL(str(path)), []
        self.why = ctypes.create_string_buffer(256)
        for name in ("plan_load", "active_plan"):
            getattr(self._c, name).restype = ctypes.c_void_p
        self._c.contradiction.restype = ctypes.c_char_p
        self._c.decide.restype = Decision
        self._c.hash_of.restype = self._c.host_identity.restype = ctypes.c_uint64
        self._c.graph_text.restype = self._c.posts_before_mark.restype = ctypes.c_size_t

    def __getattr__(self, name):
        return getattr(self._c, name)

    def plan(self, path):
        """Return the plan of an index, or None, as a pointer."""
        self._kept.append(ctypes.create_string_buffer(str(path).encode()))
        found = self._c.plan_load(self._kept[-1], self.why)
        return found and ctypes.c_void_p(found)

    def start(self, release=(2, 30, 7)):
        """Start as NCCL does; return the plan in use, or None."""
        Environment.in_dll(self._c, "ncclEnvPlugin_v2").init(*release, None, None)
        found = self._c.active_plan()
        return found and ctypes.c_void_p(found)

    def get(self, name):
        answer = Environment.in_dll(self._c, "ncclEnvPlugin_v2").get(name.encode())
        return answer and answer.decode()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    needs("a C compiler")
    return build_plugin(tmp_path_factory.mktemp("open"), flags=("-fvisibility=default",))


@pytest.fixture(scope="module")
def shared(built):
    return Library(built)


@pytest.fixture
def library(built, tmp_path, monkeypatch):
    """One that has not started, in an environment without variables of NCCL."""
    for name in [name for name in os.environ if name.startswith(("NCCL_", "TCCL_", "SLURM"))]:
        monkeypatch.delenv(name)
    return Library(shutil.copy(built, tmp_path / "own.so"))


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    """A plan with a line of every kind; two sets have no file."""
    tables = [one for one in random_tables(3, GPUS) if one.entries]
    tables = [
        type(one)(
            gpus=tuple(2 * gpu for gpu in one.gpus),
            measured_on=tuple(2 * gpu for gpu in one.gpus),
            entries=one.entries,
        )
        for one in tables
    ]
    return make_plan(
        tmp_path_factory.mktemp("plans") / "rich",
        buses=BUSES,
        sizes=(2, 3, 4),
        missing=((0, 2), (0, 4, 6)),
        nodes={gpu: gpu % 3 for gpu in BUSES},
        tables=tables[2:],
        **RULES,
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    two = {gpu: BUSES[gpu] for gpu in (0, 2)}
    return make_plan(tmp_path_factory.mktemp("plans") / "job", buses=two, sizes=(2,), job=6)


# decide.c


def sealed(post, magic=b"tcclpost"):
    """Return the bytes of a post."""
    values = [post[name] for name in FIELDS]
    data = POST.pack(magic, *values, 0, 0)[:-8]
    return data + blake2b(data, digest_size=32).digest()[:8]


def plan_digest(plan):
    body = plan.index.read_bytes().split(b"\n", 2)[2]
    return blake2b(body, digest_size=32).digest()


def right_posts(plan, gpus, ranks, source):
    """Return posts of ranks that agree; `gpus` are places in the index."""
    base = {"hash": HASH, "ranks": ranks, "host": HOST, "refusal": 0, "nccl": NCCL, "tuned": 1}
    numbers = source.sample(range(ranks), len(gpus))
    nvml = source.sample(range(256), len(gpus))
    return [
        base | {"digest": plan_digest(plan), "rank": rank, "gpu": gpu, "nvml": index}
        for rank, gpu, index in zip(numbers, gpus, nvml, strict=True)
    ]


CHANGES = {
    "hash": (HASH + 1, 0),
    "rank": (0, 1, 6, 1 << 31),
    "ranks": (1, 2, 3, 4, 6, 7),
    "host": (HOST + 1, 0),
    "refusal": (1, 2, 3, 4, 5, 1 << 31),
    "gpu": (0, 1, 2, 3, 4, -1, 64),
    "nvml": (-1, 255, 256),
    "nccl": (22809, 23006),
    "digest": (bytes(32), b"\1" * 32),
    "tuned": (0,),
}


def expected_choice(plan, own, posts, whole, job):
    """Return the set's name and whether it has a table; None, False: default NCCL."""
    if len(posts) > 64 or (own["ranks"] != job if job else len(posts) != own["ranks"]):
        return None, False
    if job:
        here = [post for post in posts if post["host"] == own["host"]]
        posts, whole = here, [whole[posts.index(post)] for post in here]
    for post in posts:
        equal = ("hash", "ranks", "host", "digest", "nccl")
        if not all(whole) or any(post[name] != own[name] for name in equal):
            return None, False
        good = post["rank"] < post["ranks"] and not post["refusal"]
        if not good or post["gpu"] not in range(GPUS if not job else 2):
            return None, False
        if post["nvml"] not in range(256):
            return None, False
    if any(len({post[name] for post in posts}) < len(posts) for name in ("rank", "gpu", "nvml")):
        return None, False
    order = sorted(BUSES)
    gpus = tuple(sorted(order[post["gpu"]] for post in posts))
    tuned = f"tune {','.join(map(str, gpus))} " in plan.index.read_text()
    name = plan.file(gpus) if gpus in plan.orders else None
    return name, tuned and all(post["tuned"] & 1 for post in posts)


@pytest.mark.parametrize("kind", ["rich", "job"])
def test_ranks_get_a_file_only_where_all_posts_agree(shared, kind, request):
    made, source, taken = request.getfixturevalue(kind), random.Random(7), 0
    plan, ranks_of_job = shared.plan(made.index), 6 if kind == "job" else 0
    count = 2 if ranks_of_job else GPUS
    for _ in range(1500):
        gpus = source.sample(range(count), source.randint(2, count))
        posts = right_posts(made, gpus, ranks_of_job or len(gpus), source)
        if ranks_of_job:
            others = right_posts(made, [0, 1], 6, source)
            posts += [post | {"host": HOST + 1} for post in others]
        for _ in range(source.choice((0, 1, 1, 2))):
            name = source.choice(FIELDS)
            posts[source.randrange(len(posts))][name] = source.choice(CHANGES[name])
        if source.random() < 0.1:
            posts = posts[:-1] if source.random() < 0.5 else [*posts, dict(posts[0])]
        whole, data = [source.random() < 0.97 for _ in posts], []
        for post, good in zip(posts, whole, strict=True):
            data.append(bytearray(sealed(post)))
            place = source.choice([*range(24), *range(32, 104)])  # not the host: see decide
            data[-1][place] ^= 0 if good else 1 << source.randrange(8)
        own, sent = posts[0], b"".join(data) + bytes(source.random() < 0.03)
        found = shared.decide(plan, sealed(own), sent, ctypes.c_size_t(len(sent)))
        right = expected_choice(made, own, posts, whole, ranks_of_job)
        right = right if len(sent) % 104 == 0 else (None, False)
        name = found.set.contents.name.decode() if found.set else None
        assert (name, bool(found.table)) == right, (found.why, posts)
        assert bool(found.why) == (not found.set)
        taken += bool(found.set)
        if found.set:
            check_text(shared, made, plan, found, posts, own)
    assert 300 < taken < 1200


def check_text(library, made, plan, found, posts, own):
    """Check that the graph file has today's NVML indices, where there is room for it."""
    here = [post for post in posts if post["host"] == own["host"]]
    nvml = {sorted(BUSES)[post["gpu"]]: post["nvml"] for post in here}
    text = (made.folder / found.set.contents.name.decode()).read_bytes()
    right = re.sub(
        rb'(<gpu dev="0x)([0-9a-f]+)', lambda m: m[1] + b"%x" % nvml[int(m[2], 16)], text
    )
    out = ctypes.create_string_buffer(2 * len(text))
    for room, length in ((len(out), len(right)), (len(right) // 2, 0)):
        pointer, size = ctypes.byref(found), ctypes.c_size_t(room)
        assert library.graph_text(plan, pointer, out, size) == length
    assert library.graph_text(plan, ctypes.byref(found), out, ctypes.c_size_t(len(out)))
    assert out.raw[: len(right)] == right


def test_posts_behind_the_first_mark_do_not_count(shared, rich):
    posts = [sealed(post) for post in right_posts(rich, [0, 1, 2], 3, random.Random(1))]
    mark = b"tcclread" + bytes(96)
    for number in range(4):
        data = b"".join([*posts[:number], mark, *posts[number:]])
        found = shared.posts_before_mark(data, ctypes.c_size_t(len(data)))
        assert found == number * 104
    data = b"".join(posts) + b"x"
    assert shared.posts_before_mark(data, ctypes.c_size_t(len(data))) == len(data)


# index.c and files.c

ANY = r"[^ \n]+"
BAD_LINES = {
    "another form": (r"\Atccl-index 2", "tccl-index 3"),
    "provenance": (r"simulated", "guessed"),
    "no provenance": (r"provenance simulated\n", ""),
    "twice": (r"(numa .*\n)", r"\1\1"),
    "order": (r"(driver .*\n)(numa .*\n)", r"\2\1"),
    "nccl without a minor": (r"nccl -", "nccl 2"),
    "nccl with a letter": (r"nccl -", "nccl 2.x"),
    "nccl that is no number": (r"nccl -", "nccl x.28"),
    "nccl of three parts": (r"nccl -", "nccl 2.28.7"),
    "a large minor": (r"nccl -", "nccl 2.100"),
    "no minor": (r"nccl -", "nccl 2.-"),
    "driver": (r"driver -", "driver 10000"),
    "driver with a sign": (r"driver -", "driver +5"),
    "NUMA nodes": (r"numa -", "numa 1025"),
    "a leading zero": (r"numa -", "numa 02"),
    "a job of one": (r"(numa .*\n)", r"\1job 1\n"),
    "a job of several sets": (r"(numa .*\n)", r"\1job 6\n"),
    "no GPUs": (r"(gpu .*\n)+", ""),
    "GPUs out of order": (r"(gpu 0 .*\n)(gpu 2 .*\n)", r"\2\1"),
    "an NVML index too large": (r"gpu 6 ", "gpu 256 "),
    "no NVML index": (r"gpu 6 ", "gpu - "),
    "a bus id twice": (r"0000:11:00.0", "0000:10:00.0"),
    "a bus id twice in other letters": (r"0000:11:00.0", "00000000:10:00.0"),
    "half a bus id": (r"0000:11:00.0", "0000:11:00"),
    "a bus id and more": (r"0000:11:00.0", "0000:11:00.0.1"),
    "a bus id that is none": (r"0000:11:00.0", "0000:1x:00.0"),
    "a GPU without a UUID": (r"(gpu 6 \S+) -", r"\1"),
    "an own variable that is needed": (r"need NCCL_P2P_LEVEL", "need NCCL_NET_PLUGIN"),
    "an own variable that is given": (r"give NCCL_BUFFSIZE", "give NCCL_GRAPH_FILE"),
    "a variable without a value": (r"must NCCL_ALGO Ring", "must NCCL_ALGO"),
    "a forbidden variable with a value": (r"(forbid NCCL_CROSS_NIC)", r"\1 1"),
    "variables out of order": (r"(need .*\n)(give .*\n)", r"\2\1"),
    "too many variables": (r"(forbid NCCL_CROSS_NIC\n)", r"\1" * 70),
    "a set of one GPU": (r"set 0,4 ", "set 4 "),
    "a set of a GPU that is none": (r"set 0,4 ", "set 0,5 "),
    "a set in another order": (r"set 0,4 ", "set 4,0 "),
    "a GPU twice": (r"set 0,4 ", "set 0,0,4 "),
    "a set that ends with a comma": (r"set 0,4 ", "set 0,4, "),
    "a set twice": (r"(set 0,4 .*\n)", r"\1\1"),
    "sets out of order": (r"(set 0,4 .*\n)(set 2,4 .*\n)", r"\2\1"),
    "no file": (r"(set 0,4 )\S+", r"\1none.xml"),
    "a file from the root": (r"(set 0,4 )(\S+)", r"\1/\2"),
    "a file above": (r"(set 0,4 )(\S+)", r"\1../rich/\2"),
    "another digest": (r"(set 0,4 \S+ )\S+", r"\1" + "0" * 64),
    "no digest": (r"(set 0,4 \S+ )\S+", r"\1-"),
    "no file, but a digest": (r"(set 0,4 )\S+ ", r"\1- "),
    "another set's file": (r"(set 0,4 )\S+ \S+", None),
    "too few nodes": (r"(set 0,4 .*),1", r"\1"),
    "too many nodes": (r"(set 0,4 .*)\n", r"\1,1\n"),
    "a node too large": (r"(set 0,4 .*=)0", r"\g<1>1024"),
    "another word": (r"(set 0,4 .*)NODES", r"\1NUMA"),
    "a sixth field": (r"(set 0,4 .*)\n", r"\1 x\n"),
    "a collective": (rf"(tune {ANY}) {ANY}", r"\1 all_to_all"),
    "an algorithm": (rf"(tune {ANY} {ANY} {ANY} {ANY}) {ANY}", r"\1 nvls"),
    "a protocol": (rf"(tune {ANY} {ANY} {ANY} {ANY} {ANY}) {ANY}", r"\1 ll64"),
    "channels": (rf"(tune {ANY} {ANY} {ANY} {ANY} {ANY} {ANY}) {ANY}", r"\1 65"),
    "no channels": (rf"(tune {ANY} {ANY} {ANY} {ANY} {ANY} {ANY}) {ANY}", r"\1 -"),
    "a range that ends before it begins": (rf"(tune {ANY} {ANY}) {ANY} {ANY}", r"\1 8 4"),
    "a size too large": (rf"(tune {ANY} {ANY} {ANY}) {ANY}", rf"\1 {(1 << 50) + 1}"),
    "a size that is none": (rf"(tune {ANY} {ANY}) {ANY}", r"\1 4K"),
    "a range twice": (r"(tune .*\n)", r"\1\1"),
    "another collective first": (
        r"(tune (\S+) broadcast .*\n)((?:.*\n)*?)(tune \2 all_reduce .*\n)",
        r"\4\1\3",
    ),
    "tables out of order": (r"(tune (\S+) .*\n)(tune (?!\2 ).*\n)", r"\3\1"),
    "two spaces": (r"(forbid) ", r"\1  "),
    "a space at the end": (r"(forbid .*)\n", r"\1 \n"),
    "an empty line": (r"(forbid .*\n)", r"\1\n"),
    "a tab": (r"forbid ", "forbid\t"),
    "another letter": (r"NCCL_CROSS_NIC", "NCCL_CROSS_N\u00cfC"),
    "a NUL": (r"NCCL_CROSS_NIC", "NCCL_CROSS\0NIC"),
    "an unknown line": (r"(forbid .*\n)", r"\1allow NCCL_X\n"),
    "nothing behind the end": (r"end\n", "end\nend\n"),
    "no end": (r"end\n", ""),
    "no newline": (r"end\n", "end"),
}


def rewritten(folder, text, *, seal=True):
    """Write an index with the digest of its text."""
    head, _, body = text.split("\n", 2)
    data = body.encode("latin-1")
    line = digest(data) if seal else text.split("\n", 2)[1].split()[1]
    path = folder / "plugin.index"
    path.write_bytes(f"{head}\ndigest {line}\n".encode() + data)
    return path


@pytest.fixture(scope="module")
def copied(rich, tmp_path_factory):
    return Path(shutil.copytree(rich.folder, tmp_path_factory.mktemp("copied") / "rich"))


@pytest.mark.parametrize("fault", BAD_LINES)
def test_an_index_with_one_bad_line_is_refused(shared, rich, copied, fault):
    text = rich.index.read_text()
    assert shared.plan(rewritten(copied, text)), shared.why.value
    old, new = BAD_LINES[fault]
    if new is None:
        new = r"\1" + re.search(r"^set 2,4 (\S+ \S+)", text, re.M)[1]
    changed, count = re.subn(old, new, text, count=1)
    assert count == 1 and changed != text
    assert not shared.plan(rewritten(copied, changed))
    assert shared.why.value
    assert not shared.plan(rewritten(copied, text + "\n"))


def test_an_index_whose_digest_is_of_other_text_is_refused(shared, rich, copied):
    changed = rich.index.read_text().replace("give NCCL_BUFFSIZE 131072", "give NCCL_BUFFSIZE 1")
    assert shared.plan(rewritten(copied, changed))
    assert shared.plan(rewritten(copied, rich.index.read_text() + "", seal=False)) is not None
    assert not shared.plan(rewritten(copied, changed, seal=False))
    assert b"another digest" in shared.why.value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"0x4"', '"0x6"'),  # another GPU
        ('"0x4"', '"0x5"'),  # none of the plan's
        ('"0x4"', '"0x4 "'),
        ('"0x4"', '"0x"'),
        ("</graphs>", "</graphs>\0"),
        ('<gpu dev="0x4"', '<cpu dev="0x4"'),
    ],
)
def test_a_graph_file_of_other_gpus_is_refused_whatever_its_digest(shared, rich, copied, old, new):
    name = rich.file((0, 4))
    data = (rich.folder / name).read_text().replace(old, new).encode()
    (copied / name).write_bytes(data)
    text = re.sub(r"(set 0,4 \S+ )\S+", r"\g<1>" + digest(data), rich.index.read_text())
    assert not shared.plan(rewritten(copied, text))
    assert b"not the file of the index" in shared.why.value
    assert not shared.plan(rewritten(copied, rich.index.read_text()))
    shutil.copy(rich.folder / name, copied / name)
    assert shared.plan(rewritten(copied, rich.index.read_text()))


def test_a_job_has_one_set_and_no_table(shared, job, tmp_path):
    shutil.copytree(job.folder, tmp_path / "job")
    text = job.index.read_text()
    assert shared.plan(rewritten(tmp_path / "job", text))
    for old, new in (
        ("job 6", "job -"),
        (r"set .*\n", ""),
        ("end", "tune 0,2 reduce 0 1 ring ll 0\nend"),
    ):
        assert not shared.plan(rewritten(tmp_path / "job", re.sub(old, new, text)))


def test_the_index_is_named_from_the_root_and_no_folder_on_the_way_is_a_link(
    shared, rich, tmp_path, monkeypatch
):
    monkeypatch.chdir(rich.folder)
    (tmp_path / "link").symlink_to(rich.folder)
    for path in ("plugin.index", "./plugin.index", tmp_path / "link" / "plugin.index"):
        assert not shared.plan(path)
    assert not shared.plan(f"{rich.folder}/subsets/../plugin.index")
    assert shared.plan(f"/{rich.folder}//plugin.index")


def test_digests_are_those_of_python(shared):
    source = random.Random(5)
    for size in (0, 1, 127, 128, 129, 255, 256, 257, 1000):
        data = source.randbytes(size)
        right = int.from_bytes(blake2b(data, digest_size=32).digest()[:8], "little")
        assert shared.hash_of(data, ctypes.c_size_t(size)) == right


# process.c and host.c

FITS = {
    "all": ({}, {}, (2, 30, 7), True),
    "its release": ({"nccl": "2.30"}, {}, (2, 30, 7), True),
    "another minor": ({"nccl": "2.28"}, {}, (2, 30, 7), False),
    "another major": ({"nccl": "3.30"}, {}, (2, 30, 7), False),
    "a later minor": ({"nccl": "2.31"}, {}, (2, 30, 7), False),
    "the first release": ({"given": {}}, {}, (2, 28, 7), True),
    "one before the first": ({"given": {}}, {}, (2, 28, 6), False),
    "the last": ({}, {}, (2, 32, 99), True),
    "one after the last": ({}, {}, (2, 33, 0), False),
    "one that was tried": ({}, {"TCCL_NEWER_NCCL": "2.33.0"}, (2, 33, 0), True),
    "one after what was tried": ({}, {"TCCL_NEWER_NCCL": "2.33.0"}, (2, 33, 1), False),
    "variables that an old NCCL reads once": ({}, {}, (2, 29, 7), False),
    "variables that any NCCL reads anew": ({"given": {"NCCL_ALGO": "Ring"}}, {}, (2, 29, 7), True),
    "another driver": ({"driver": 9998}, {}, (2, 30, 7), False),
    "other NUMA nodes": ({"numa": 1000}, {}, (2, 30, 7), False),
    "disabled": ({}, {"TCCL_DISABLE": "1"}, (2, 30, 7), False),
    "disabled by a word": ({}, {"TCCL_DISABLE": "yes"}, (2, 30, 7), False),
    "not disabled": ({}, {"TCCL_DISABLE": "0"}, (2, 30, 7), True),
    "nor by nothing": ({}, {"TCCL_DISABLE": ""}, (2, 30, 7), True),
    "a job that is not there": ({}, {"TCCL_JOB": "/nowhere"}, (2, 30, 7), False),
}


@pytest.mark.parametrize("case", FITS)
def test_a_plan_is_for_its_release_driver_and_numa_nodes(library, tmp_path, monkeypatch, case):
    fields, env, release, fits = FITS[case]
    rules = RULES | {"must": {}} | fields
    plan = make_plan(tmp_path / "plan", buses=BUSES, sizes=(2,), **rules)
    for name, value in {"TCCL_INDEX": str(plan.index), **env}.items():
        monkeypatch.setenv(name, value)
    assert bool(library.start(release)) == fits
    own = library.get("NCCL_NET_PLUGIN") or ""
    assert own.startswith(str(tmp_path)) == fits
    assert library.get("NCCL_GRAPH_FILE") is None


def test_a_process_that_may_not_write_or_whose_library_has_a_comma_has_no_plan(
    built, library, rich, tmp_path, monkeypatch
):
    monkeypatch.setenv("TCCL_INDEX", str(rich.index))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))
    try:
        assert not library.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not Library(shutil.copy(built, tmp_path / "a,b.so")).start()
    (long := tmp_path / ("d" * 200)).mkdir()
    assert not Library(shutil.copy(built, long / f"{'l' * 60}.so")).start()
    assert Library(shutil.copy(built, tmp_path / "good.so")).start()


def test_any_variable_that_contradicts_the_plan_is_named(library, rich, monkeypatch):
    monkeypatch.setenv("TCCL_INDEX", str(rich.index))
    plan, source, found = library.start(), random.Random(3), set()
    choices = {
        "NCCL_GRAPH_FILE": (None, None, None, "x"),
        "NCCL_COMM_ID": (None, None, None, "host:1"),
        "NCCL_CROSS_NIC": (None, None, "0"),
        "NCCL_SHM_DISABLE": (None, None, "0", ""),
        "NCCL_P2P_LEVEL": ("SYS", "sys", "SYS", "PHB", None, ""),
        "NCCL_ALGO": (None, "Ring", "RING", "Tree", ""),
        "NCCL_BUFFSIZE": (None, "4096"),  # given: the user's own stays, and contradicts nothing
    }
    for _ in range(300):
        values = {name: source.choice(kinds) for name, kinds in choices.items()}
        for name, value in values.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        wrong = {name for name in list(choices)[:4] if values[name] is not None}
        wrong |= {"NCCL_P2P_LEVEL"} if (values["NCCL_P2P_LEVEL"] or "").lower() != "sys" else set()
        wrong |= {"NCCL_ALGO"} if values["NCCL_ALGO"] not in (None, "Ring", "RING") else set()
        named = library.contradiction(plan)
        assert (named.decode() in wrong) if wrong else named is None
        found.add(named)
        assert library.get("NCCL_BUFFSIZE") == values["NCCL_BUFFSIZE"]
    assert len(found) == 7


def test_values_of_another_environment_plugin_are_the_users(library, tmp_path, monkeypatch):
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "env.so", HERE / "other_env.c"], check=True
    )
    rules = {"forbid": ("NCCL_BUFFSIZE",)}
    plan = make_plan(tmp_path / "plan", buses=BUSES, sizes=(2,), **rules)
    monkeypatch.setenv("TCCL_INDEX", str(plan.index))
    monkeypatch.setenv("TCCL_ENV_PLUGIN_NEXT", str(tmp_path / "env.so"))
    active = library.start()
    assert library.contradiction(active) == b"NCCL_BUFFSIZE"
    assert library.get("NCCL_BUFFSIZE") == "2097152"


def test_a_job_finds_its_hosts_index_by_any_name_of_the_host(built, tmp_path, monkeypatch):
    hosts = tmp_path / "job" / "nccl" / "hosts"
    hosts.mkdir(parents=True)
    monkeypatch.setenv("TCCL_JOB", str(tmp_path / "job"))
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    name = os.uname().nodename
    for number, stem in enumerate((name, name.split(".")[0], "node7", "other")):
        plan = make_plan(tmp_path / f"plan{number}", buses=BUSES, sizes=(4,), job=6)
        shutil.copytree(plan.folder / "subsets", hosts / "subsets", dirs_exist_ok=True)
        shutil.copy(plan.index, hosts / f"{stem}.index")
        started = Library(shutil.copy(built, tmp_path / f"{number}.so")).start()
        assert bool(started) == (stem != "other")
        (hosts / f"{stem}.index").unlink()


def test_a_host_is_told_by_its_id_or_by_name_and_boot(shared):
    assert shared.host_identity(b"a") != shared.host_identity(b"b")
    own = os.uname().nodename + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    right = int.from_bytes(blake2b(own.encode(), digest_size=32).digest()[:8], "little")
    assert shared.host_identity(None) == right


# board.c

DEAD, LIVE = 0xDEAD0000, 0x11FE0000


@pytest.fixture
def board():
    """A board's path; its name is this process's alone."""
    folder = Path(f"/dev/shm/tccl-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{os.getpid():08x}{random.randrange(1 << 32):08x}"
    yield path
    path.unlink(missing_ok=True)


def post_on(library, board, rank=0):
    """Post; return the board's file, or -1."""
    post = dict.fromkeys(FIELDS, 0) | {"hash": int(board.name, 16), "rank": rank}
    return library.board_post(sealed(post | {"digest": bytes(32)}), library.why)


def leave(library, board, fd, *, decided):
    library.board_leave(fd, ctypes.c_uint64(int(board.name, 16)), ctypes.c_bool(decided))


def test_ranks_join_a_board_that_a_living_rank_holds_and_no_other(shared, board):
    board.write_bytes(bytes(104))  # of killed ranks
    first = post_on(shared, board)
    assert board.stat().st_size == 104 and board.read_bytes()[:8] == b"tcclpost"
    second = post_on(shared, board, rank=1)
    assert board.stat().st_size == 208
    shared.board_mark(second)
    assert board.read_bytes()[208:216] == b"tcclread"
    leave(shared, board, second, decided=False)
    assert board.exists()  # the first holds it
    leave(shared, board, first, decided=False)
    assert not board.exists()
    third = post_on(shared, board)
    assert board.stat().st_size == 104
    fourth = post_on(shared, board, rank=1)
    leave(shared, board, third, decided=True)
    assert not board.exists()
    fifth = post_on(shared, board)
    leave(shared, board, fourth, decided=True)
    leave(shared, board, fifth, decided=False)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "another user's"])
def test_a_board_that_is_no_file_of_this_user_is_not_posted_on(shared, board, tmp_path, kind):
    other = tmp_path / "other"
    other.write_bytes(b"")
    match kind:
        case "link":
            board.symlink_to(other)
        case "fifo":
            os.mkfifo(board)
        case "folder":
            board.mkdir()
        case _:
            needs("root")
            board.write_bytes(b"")
            os.chown(board, 12345, -1)
    assert post_on(shared, board) == -1 and b"cannot post" in shared.why.value
    assert other.read_bytes() == b""
    if kind == "folder":
        board.rmdir()
    else:
        assert kind != "another user's" or board.read_bytes() == b""


def test_boards_of_killed_ranks_are_swept_and_no_others(shared, board):
    number = int(board.name, 16)
    stale, name = board.with_name(f"{number ^ 1:016x}"), board.with_name(f"{board.name}.x")
    held, upper = post_on(shared, board), board.with_name("A" + board.name[1:])
    kept = [name, upper]
    for path in (stale, *kept):
        path.write_bytes(bytes(104))
    shared.boards_sweep()
    try:
        assert (board.exists(), stale.exists()) == (True, False)
        assert all(path.exists() for path in kept)
    finally:
        for path in kept:
            path.unlink()
        leave(shared, board, held, decided=True)


FOLDERS = """
import ctypes, os, sys
from pathlib import Path
library, kind = ctypes.CDLL(sys.argv[1]), sys.argv[2]
user, folder = 3_000_000_000 + os.getpid(), Path(f"/dev/shm/tccl-{3_000_000_000 + os.getpid()}")
if kind != "none":
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345 if kind == "another user's" else user, -1)
    folder.chmod(0o770 if kind == "others write" else 0o700)
    if kind == "link":
        folder = folder.rename(f"{folder}.other")
        Path(f"/dev/shm/tccl-{user}").symlink_to(folder)
os.seteuid(user)
fd = library.board_post(bytes.fromhex(sys.argv[3]), ctypes.create_string_buffer(256))
mode = folder.stat().st_mode & 0o777
if fd >= 0:
    library.board_leave(fd, ctypes.c_uint64(int(sys.argv[4])), ctypes.c_bool(True))
os.seteuid(0)
print(fd >= 0, f"{mode:o}", Path(f"/dev/shm/tccl-{user}").exists(), len(list(folder.glob("*"))))
for path in (Path(f"/dev/shm/tccl-{user}"), folder):
    path.unlink() if path.is_symlink() else path.exists() and path.rmdir()
"""


@pytest.mark.parametrize("kind", ["none", "own", "another user's", "others write", "link"])
def test_ranks_post_in_a_folder_that_is_theirs_alone(built, kind, tmp_path):
    needs("root")
    library = Path(shutil.copy(built, "/dev/shm")) if False else built
    post = sealed(dict.fromkeys(FIELDS, 0) | {"hash": 9, "digest": bytes(32)}).hex()
    command = [sys.executable, "-c", FOLDERS, library, kind, post, "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    good = kind in ("none", "own", "others write")
    assert done.stdout.split() == [str(good), "700", str(not good), "0"]
