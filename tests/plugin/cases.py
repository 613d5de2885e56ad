"""Cases: a scenario, what is special about it, and what its communicators must get."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.plugin.runs import differences, make_plan, run_ranks

HERE = Path(__file__).resolve().parent


class Case(msgspec.Struct, kw_only=True):
    """A scenario run by `size` ranks.

    It is for releases from `since` to before `until`; a `real` case needs real GPUs. `default` are
    the names of communicators that must get default NCCL, or True for all. `prepare` is given the
    case's folder and its plan, and returns more options of `run_ranks`; `plan` are fields of the
    index. `check` returns complaints about a result. With `like_default` communicators end as
    without the plugin: default NCCL fails there too.
    """

    name: str
    scenario: str = "world"
    size: int = 4
    default: bool | tuple[str, ...] = ()
    options: dict = {}
    plan: dict = {}
    prepare: Callable | None = None
    check: Callable | None = None
    like_default: bool = False
    real: bool = False
    since: str = "2.28"
    until: str = "3"


def run_case(case, folder, version):
    """Return complaints about a case, as lines."""
    plan = make_plan(folder / "plan", **case.plan)
    options = dict(case.options)
    if case.prepare is not None:
        options |= case.prepare(folder, plan)
    result = run_ranks(
        folder / "run", case.scenario, case.size, plan=plan, version=version, **options
    )
    if case.like_default:
        plain = run_ranks(
            folder / "plain", case.scenario, case.size, plan=None, version=version, **options
        )
        return _unlike(result, plain)
    wrong = differences(result, plan, default=case.default)
    if case.check is not None:
        wrong += case.check(result, folder)
    return wrong


def _unlike(result, plain):
    codes = [[[one.code for one in made or ()] for made in run.made] for run in (result, plain)]
    wrong = [] if codes[0] == codes[1] else [f"codes {codes[0]}, without the plugin {codes[1]}"]
    return wrong + [f"got {one.graph}" for made in result.made for one in made if one.graph]


def compile_c(name, folder):
    """Return the path of a shared library made of a C file beside this module."""
    target = folder / f"{Path(name).stem}.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(target), str(HERE / name)]
    subprocess.run(command, check=True)
    return target


def _own_file(folder, plan):
    own = folder / "own.xml"
    shutil.copy(plan.folder / plan.file((0, 1, 2, 3)), own)
    return {"env": {"NCCL_GRAPH_FILE": str(own), "OWN_FILE": str(own)}}


def _own_file_later(folder, plan):
    options = _own_file(folder, plan)
    del options["env"]["NCCL_GRAPH_FILE"]
    return options


def _only_own_file(result, folder):
    files = {file for made in result.made for one in made for file in one.files}
    return [] if files == {str(folder / "own.xml")} else [f"NCCL was told {files}"]


def _own_in_the_middle(result, folder):
    found = [[sorted(set(one.files)) for one in made] for made in result.made]
    good = all(
        len(files) == 3 and files[1] == [str(folder / "own.xml")] != files[0] for files in found
    )
    return [] if good else [f"NCCL was told {found}"]


def _another_index(folder, plan):
    other = make_plan(folder / "other", forbid=("NCCL_CROSS_NIC",))
    return {"rank_env": {1: {"TCCL_INDEX": str(other.index)}}}


def _linked_index(folder, plan):
    (folder / "link").symlink_to(plan.folder)
    return {"rank_env": {1: {"TCCL_INDEX": str(folder / "link" / plan.index.name)}}}


def _open_folder(folder, plan):
    plan.folder.chmod(0o777)
    return {}


def _damaged_graph(folder, plan):
    with (plan.folder / plan.file((0, 5))).open("ab") as file:
        file.write(b"\n")
    return {}


def _other_net(folder, plan):
    library = compile_c("other_net.c", folder)
    return {"env": {"NCCL_NET_PLUGIN": str(library)}}


def _other_env(folder, plan):
    return {"env": {"TCCL_ENV_PLUGIN_NEXT": str(compile_c("other_env.c", folder))}}


def _other_env_answers(result, folder):
    text = (folder / "run" / "log.0").read_text()
    good = "NCCL_BUFFSIZE set by environment to 2097152" in text
    return [] if good else ["the other environment plugin was not asked"]


def _alike(result, folder):
    """Any choice is right that is the same on all ranks."""
    graphs = {}
    for made in result.made:
        for one in made or ():
            graphs.setdefault(one.name, set()).add(one.graph)
    return [f"{name}: ranks differ" for name, found in graphs.items() if len(found) > 1]


def _private_shm(script):
    """Run in a mount namespace with another /dev/shm."""

    def prepare(folder, plan):
        command = ["unshare", "-m", "sh", "-c", f'{script}; exec "$@"', "sh"]
        if subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
            pytest.skip("this user cannot make mount namespaces")
        return {"wrapper": command}

    return prepare


def _visible(gpus):
    return {
        "gpus": list(gpus),
        "devices": [0] * len(gpus),
        "rank_env": {rank: {"CUDA_VISIBLE_DEVICES": str(gpu)} for rank, gpu in enumerate(gpus)},
    }


GIVEN = {"NCCL_BUFFSIZE": "131072", "NCCL_MIN_NCHANNELS": "8"}
SEPARATE = {"NCCL_COMM_SPLIT_SHARE_RESOURCES": "0", "NCCL_COMM_SHRINK_SHARE_RESOURCES": "0"}
SINGLE = {"given": GIVEN, "needed": SEPARATE}


def _given_where_planned(result, folder):
    """Communicators with a graph file have the plan's variables, and no others have."""
    return [
        f"{made.name} over {made.gpus}: {made.graph or 'no file'}, {made.variables}"
        for records in result.made
        for made in records or ()
        if made.rings and made.variables != (GIVEN if made.graph else {})
    ]


LACKS = {"rank_env": {2: {"NCCL_ENV_PLUGIN": None}}}


def _hosts_buffers(placed):
    """Return a check that all logs, or none, tell where NCCL's host buffers are."""

    def check(result, folder):
        logs = [path.read_text() for path in sorted((folder / "run").glob("log.*"))]
        told = {"host buffers" in log for log in logs}
        return [] if told == {placed} else [f"host buffers are told of by {told}"]

    return check


CASES = (
    *(Case(name=f"world{size}", size=size) for size in range(2, 9)),
    Case(name="many4", scenario="many"),
    Case(name="many8", scenario="many", size=8),
    Case(name="split4", scenario="split"),
    Case(name="split8", scenario="split", size=8),
    Case(name="share", scenario="share"),
    Case(name="group", scenario="group"),
    # Virtual GPUs are one a process.
    Case(name="one process", scenario="one_process", size=1, options={"argument": 8}, real=True),
    Case(name="shrunk", scenario="shrunk"),
    Case(name="visible pair", size=2, options=_visible((5, 2))),
    Case(name="visible three", size=3, options=_visible((7, 0, 4))),
    Case(name="single", size=1, default=True),
    Case(name="NCCL_NET=Socket", scenario="many", options={"env": {"NCCL_NET": "Socket"}}),
    Case(name="set without file", plan={"missing": {(0, 1, 2, 3)}}, default=True),
    Case(name="own file", default=True, prepare=_own_file, check=_only_own_file),
    Case(
        name="own file later",
        scenario="own_file_later",
        default=("own",),
        prepare=_own_file_later,
        check=_own_in_the_middle,
    ),
    Case(
        name="contradicting variable",
        default=True,
        options={"env": {"NCCL_P2P_LEVEL": "PHB"}},
        plan={"must": {"NCCL_P2P_LEVEL": "SYS"}},
    ),
    Case(
        name="contradicting variable of one rank",
        default=True,
        options={"rank_env": {1: {"NCCL_IGNORE_CPU_AFFINITY": "1"}}},
        plan={"forbid": ("NCCL_IGNORE_CPU_AFFINITY",)},
    ),
    Case(
        name="rank without plugin",
        scenario="many",
        default=("world", "pair2", "triple", "later", "cross0"),
        options=LACKS,
        check=_alike,
    ),
    Case(name="disabled rank", default=True, options={"rank_env": {3: {"TCCL_DISABLE": "1"}}}),
    Case(name="disabled", default=True, options={"env": {"TCCL_DISABLE": "1"}}),
    Case(
        name="other host",
        default=True,
        options={"rank_env": {rank: {"NCCL_HOSTID": "other"} for rank in (2, 3)}},
    ),
    Case(name="another index", default=True, prepare=_another_index),
    Case(name="index behind a link", default=True, prepare=_linked_index),
    Case(name="folder that others write", default=True, prepare=_open_folder),
    Case(name="damaged graph file", default=True, prepare=_damaged_graph),
    Case(
        name="no /dev/shm",
        like_default=True,
        prepare=_private_shm("mount -t tmpfs -o ro none /dev/shm"),
    ),
    Case(
        name="other user's folder",
        default=True,
        prepare=_private_shm(
            "mount -t tmpfs none /dev/shm && mkdir -m 700 /dev/shm/tccl-$(id -u) && "
            "chown 12345 /dev/shm/tccl-$(id -u)"
        ),
    ),
    Case(
        name="full /dev/shm",
        like_default=True,
        prepare=_private_shm("mount -t tmpfs -o nr_inodes=1 none /dev/shm"),
    ),
    Case(name="other driver", default=True, plan={"driver": 1}),
    Case(name="other NUMA nodes", default=True, plan={"numa": 1000}),
    Case(name="other NCCL", default=True, plan={"nccl": "2.29"}),
    # NCCL disables this plugin when it assigns the other one, in a process's first communicator.
    Case(
        name="other network plugin",
        scenario="many",
        default=("pair0", "pair2", "triple", "later", "cross0", "cross1"),
        prepare=_other_net,
        check=_alike,
    ),
    Case(name="other environment plugin", prepare=_other_env, check=_other_env_answers),
    Case(
        name="placed buffers",
        scenario="many",
        plan={"nodes": dict.fromkeys(range(8), 0)},
        check=_hosts_buffers(True),
    ),
    Case(
        name="another profiler",
        plan={"nodes": dict.fromkeys(range(8), 0)},
        options={"env": {"NCCL_PROFILER_PLUGIN": "none"}},
        check=_hosts_buffers(False),
    ),
    Case(
        name="variables of single communicators",
        scenario="many",
        plan=SINGLE | {"missing": {(0, 1), (0, 1, 2)}},
        options={"env": SEPARATE},
        check=_given_where_planned,
        since="2.30",
    ),
    # A child that shared its parent's smaller buffers would overrun them.
    Case(
        name="variables of parents",
        scenario="share",
        plan=SINGLE | {"sizes": (4,)},
        options={"env": SEPARATE},
        check=_given_where_planned,
        since="2.30",
    ),
    Case(name="needed variables are missing", plan=SINGLE, default=True, since="2.30"),
    Case(
        name="variables before 2.30",
        plan=SINGLE,
        default=True,
        options={"env": SEPARATE},
        until="2.30",
    ),
    Case(name="NCCL_COMM_ID", default=True, options={"env": {"NCCL_COMM_ID": "127.0.0.1:51234"}}),
)
