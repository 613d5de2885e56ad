"""Every communicator sees the graph file for exactly its GPUs or none; the environment is kept."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tccl_py.torch
from tccl_py.errors import InputError
from tccl_py.model.machine import Fingerprint
from tccl_py.nccl.settings import environment, shell_text
from tccl_py.plan.directory import write_plan
from tccl_py.torch import groups
from tccl_py.torch.agreement import Member, why_off
from tccl_py.torch.groups import ProcessState, graph_file, host_identity, open_plan
from tests.cluster_plans import mixed
from tests.fake_torch import FakeDistributed, FakeTorch
from tests.planned import needing_a_graph, plan_of

GRAPH, TOPOLOGY = "NCCL_GRAPH_FILE", "NCCL_TOPO_FILE"
GPUS = (0, 1, 2, 3)
BOX = "amd-v100"
PRINT = Fingerprint(
    gpu_uuids=tuple(f"GPU-{one}" for one in GPUS), driver="580.1", numa_count=2, kernel="6"
)
WAYS = ("at once", "collective", "background")


def box_plan():
    return needing_a_graph(plan_of(BOX))


@pytest.fixture(scope="module")
def plan_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("machine") / "plan"
    directory.mkdir()
    write_plan(box_plan(), directory)
    return directory


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """A process that has made no communicator yet, without files of NCCL's."""
    for name in [*os.environ]:
        if name.startswith(("NCCL_", "TCCL_")):
            monkeypatch.delenv(name)
    for name in environment(box_plan().settings):
        # Noted by monkeypatch, so that it is gone again after the test.
        monkeypatch.setenv(name, "")
        del os.environ[name]
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "no.conf"))
    monkeypatch.setattr(groups, "STATE", ProcessState())


def settings_of(opened):
    """What all ranks of a plan have to set."""
    return dict(opened.delivery.variables)


def told(directory, gpus, *, host=None):
    """What ranks with these GPUs on one host tell of a plan that fits."""
    opened = open_plan(directory)
    one = Member(host=host or host_identity(), plan=opened.identity, settings=settings_of(opened))
    return [msgspec.structs.replace(one, gpu=gpu) for gpu in gpus]


class Rank:
    """One rank of a job on this host, with other ranks' answers.

    `bound` are options of the default group, by which torch makes communicators at once.
    """

    def __init__(self, monkeypatch, members, rank=0, *, when="collective", **more):
        self.members, self.rank = members, rank
        self.bound = {} if when == "collective" else {"device_id": 0}
        others = {
            number: {**msgspec.to_builtins(one), "bound": bool(self.bound)}
            for number, one in enumerate(members)
            if number != rank
        }
        self.distributed = FakeDistributed(len(members), rank, others, when)
        self.torch = FakeTorch(self.distributed, **more)
        self.fingerprint, self.gpus = PRINT, ()
        monkeypatch.setattr(groups, "import_torch", lambda: self.torch)
        monkeypatch.setattr(
            "tccl_py.torch.groups.gpu_of_cuda_device",
            lambda ordinal: (members[rank].gpu, SimpleNamespace(gpus=self.gpus)),
        )
        monkeypatch.setattr("tccl_py.delivery.fit.fingerprint_of", lambda _: self.fingerprint)

    @property
    def graphs(self):
        """The graph file of each group, in the order in which they were made."""
        return [(one.ranks, one.seen and one.seen[GRAPH]) for one in self.distributed.made]

    @property
    def connected(self):
        """The groups whose communicators exist."""
        return [one.ranks for one in self.distributed.made if one.seen]


def file_for(directory, gpus):
    """The graph file that a group of these GPUs has to see."""
    gpus = sorted(gpus)
    if len(gpus) < 2:
        return None
    name = "graph.xml" if tuple(gpus) == GPUS else f"subsets/graph-{'-'.join(map(str, gpus))}.xml"
    path = directory / "nccl" / name
    return str(path) if path.is_file() else None


# the plugin


@pytest.mark.parametrize("place", ["environment", "file"])
def test_the_plugin_answers_where_nccl_loads_it(plan_dir, monkeypatch, capfd, tmp_path, place):
    if place == "environment":
        monkeypatch.setenv("NCCL_ENV_PLUGIN", "/plan/nccl/libnccl-env-tccl.so")
    else:
        (tmp_path / "no.conf").write_text("NCCL_ENV_PLUGIN=/plan/nccl/libnccl-env-tccl.so\n")
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    why = f"rank 0 on {shown()}: NCCL_ENV_PLUGIN is set"
    stock_everywhere(rank, plan_dir, capfd, why)


def test_an_nccl_without_plugins_gets_files_whatever_plugin_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_ENV_PLUGIN", "/plan/nccl/libnccl-env-tccl.so")
    write_plan(needing_a_graph(plan_of(BOX, version="2.27")), tmp_path)
    rank = Rank(monkeypatch, told(tmp_path, GPUS), version=(2, 27, 3))
    tccl_py.torch.init_process_group(tmp_path)
    assert rank.graphs == [((0, 1, 2, 3), file_for(tmp_path, GPUS))]


# groups of one job on one machine


@pytest.mark.parametrize("when", WAYS)
def test_groups_of_a_training_job_each_see_their_own_graph(plan_dir, monkeypatch, when):
    rank = Rank(monkeypatch, told(plan_dir, GPUS), 1, when=when)
    tccl_py.torch.init_process_group(plan_dir, **rank.bound)
    tensor = tccl_py.torch.new_group([0, 1])
    assert tccl_py.torch.new_group([2, 3]) is None
    data = tccl_py.torch.new_group([1, 3])
    everybody = tccl_py.torch.new_group()
    seen = {group.ranks: group.seen[GRAPH] for group in (tensor, data, everybody)}
    assert seen == {
        (0, 1): file_for(plan_dir, (0, 1)),
        (1, 3): file_for(plan_dir, (1, 3)),
        (0, 1, 2, 3): file_for(plan_dir, GPUS),
    }
    assert all(seen.values())
    assert rank.distributed.group.WORLD.seen[GRAPH] == file_for(plan_dir, GPUS)
    assert GRAPH not in os.environ


def test_settings_are_set_before_the_first_communicator_and_stay(plan_dir, monkeypatch):
    rank = Rank(monkeypatch, told(plan_dir, GPUS), when="at once")
    wanted = environment(box_plan().settings)
    assert wanted["NCCL_P2P_LEVEL"]
    tccl_py.torch.init_process_group(plan_dir)
    level = rank.distributed.group.WORLD.seen["NCCL_P2P_LEVEL"]
    assert level == wanted["NCCL_P2P_LEVEL"]
    assert {name: os.environ.get(name) for name in wanted} == wanted


def test_gpus_are_told_by_nvml_and_not_by_the_number_cuda_gives(plan_dir, monkeypatch):
    # As with CUDA_VISIBLE_DEVICES=3,2,1,0: rank r has NVML's GPU 3 - r.
    rank = Rank(monkeypatch, told(plan_dir, (3, 2, 1, 0)), 3, current=3)
    tccl_py.torch.init_process_group(plan_dir)
    tccl_py.torch.new_group([2, 3])
    assert rank.graphs[1] == ((2, 3), file_for(plan_dir, (0, 1)))


@pytest.mark.parametrize("parent", ["world", "group"])
def test_a_split_sees_the_graph_of_its_part(plan_dir, monkeypatch, parent):
    rank = Rank(monkeypatch, told(plan_dir, GPUS), 3)
    tccl_py.torch.init_process_group(plan_dir)
    if parent == "world":
        group = tccl_py.torch.split_group(split_ranks=[[0, 1], [2, 3]])
        ranks = (2, 3)
    else:
        above = tccl_py.torch.new_group([1, 2, 3])
        group = tccl_py.torch.split_group(above, [[0, 2], [1]])
        ranks = (1, 3)
    assert (group.ranks, group.seen[GRAPH]) == (ranks, file_for(plan_dir, ranks))
    assert rank.graphs[-1][0] == ranks


def test_a_split_without_this_rank_makes_nothing(plan_dir, monkeypatch):
    Rank(monkeypatch, told(plan_dir, GPUS), 3)
    tccl_py.torch.init_process_group(plan_dir)
    assert tccl_py.torch.split_group(split_ranks=[[0, 1]]) is None


def test_groups_over_gpus_that_are_not_planned_are_stock(monkeypatch, tmp_path):
    plan = needing_a_graph(plan_of(BOX, gpus=(0, 1, 2)))
    write_plan(plan, tmp_path)
    rank = Rank(monkeypatch, told(tmp_path, GPUS), 0)
    tccl_py.torch.init_process_group(tmp_path)
    tccl_py.torch.new_group([0, 1, 2])
    tccl_py.torch.new_group([0, 3])
    seen = [graph for _, graph in rank.graphs]
    assert seen == [None, str(tmp_path / "nccl" / "graph.xml"), None]
    assert rank.connected == [(0, 1, 2)]


def test_a_group_of_one_rank_is_not_connected(plan_dir, monkeypatch):
    rank = Rank(monkeypatch, told(plan_dir, GPUS), 1)
    tccl_py.torch.init_process_group(plan_dir)
    tccl_py.torch.new_group([1])
    assert rank.connected == [GPUS]


def test_communicators_in_the_background_are_awaited_before_the_next_file(monkeypatch, tmp_path):
    write_plan(needing_a_graph(plan_of(BOX, gpus=(0, 1, 2))), tmp_path)
    rank = Rank(monkeypatch, told(tmp_path, GPUS), when="background")
    tccl_py.torch.init_process_group(tmp_path, **rank.bound)
    tccl_py.torch.new_group([0])
    assert rank.connected == [GPUS, (0,)]


def test_torchs_own_options_go_through(plan_dir, monkeypatch):
    rank = Rank(monkeypatch, told(plan_dir, GPUS), 0)
    tccl_py.torch.init_process_group(plan_dir, "nccl", device_id=2, timeout=5, store=None)
    tccl_py.torch.new_group([1, 0], timeout=3, group_desc="tp", sort_ranks=False)
    first, second = rank.distributed.options
    assert first["device_id"] == 2
    assert first["timeout"] == 5
    assert (first["rank"], first["world_size"]) == (0, 4)
    assert second == {"timeout": 3, "group_desc": "tp", "sort_ranks": False}
    assert rank.graphs[1][0] == (1, 0)
    assert "default_pg" in rank.distributed.store.prefixes


@settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    gpus=st.permutations(GPUS),
    me=st.integers(0, 3),
    when=st.sampled_from(WAYS),
    before=st.sampled_from([None, "", "/somewhere/else.xml"]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["group", "split", "fails at once", "fails later"]),
            st.sets(st.integers(0, 3), min_size=1).map(sorted),
        ),
        max_size=8,
    ),
)
def test_any_sequence_of_groups_sees_its_own_files_and_leaves_the_environment(
    plan_dir, gpus, me, when, before, steps
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "STATE", ProcessState())
        patch.delenv(GRAPH, raising=False)
        if before is not None:
            patch.setenv(GRAPH, before)
        wanted = environment(box_plan().settings)
        surroundings = {**os.environ, **wanted}
        rank = Rank(patch, told(plan_dir, gpus), me, when=when)
        tccl_py.torch.init_process_group(plan_dir, **rank.bound)
        assert os.environ == surroundings
        for kind, ranks in steps:
            rank.distributed.fails = {
                "fails at once": "group",
                "fails later": "communicator",
            }.get(kind)
            made = len(rank.distributed.made)
            try:
                if kind == "split":
                    tccl_py.torch.split_group(split_ranks=[ranks])
                else:
                    tccl_py.torch.new_group(ranks)
            except RuntimeError:
                assert kind.startswith("fails")
            if kind.startswith("fails"):
                del rank.distributed.made[made:]
            assert os.environ == surroundings
        for group in rank.distributed.made:
            planned = file_for(plan_dir, [gpus[one] for one in group.ranks])
            if planned is None and group.seen is None:
                continue
            assert group.seen[GRAPH] == (before if planned is None else planned)
            assert group.seen["NCCL_P2P_LEVEL"] == wanted["NCCL_P2P_LEVEL"]


def test_threads_wait_for_one_another(plan_dir):
    seen, start = [], threading.Barrier(8)

    def one(number):
        start.wait()
        for _ in range(50):
            with graph_file(Path(f"/{number}")):
                seen.append((number, os.environ.get(GRAPH)))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 400
    assert all(graph == f"/{number}" for number, graph in seen)
    assert GRAPH not in os.environ


def test_a_plan_leaves_the_hosts_topology_file_to_it(plan_dir, monkeypatch):
    monkeypatch.setenv(TOPOLOGY, "/opt/vendor/topo.xml")
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    tccl_py.torch.init_process_group(plan_dir)
    assert rank.graphs[0][1] == file_for(plan_dir, GPUS)
    assert rank.distributed.made[0].seen[TOPOLOGY] == "/opt/vendor/topo.xml"


# where the plan is disabled


def stock_everywhere(rank, plan_dir, capfd, said):
    tccl_py.torch.init_process_group(plan_dir)
    tccl_py.torch.new_group([0, 1])
    assert len(rank.graphs) == 2
    assert rank.connected == []
    assert GRAPH not in os.environ
    assert "NCCL_P2P_LEVEL" not in os.environ
    begin = "tccl: tccl_py.torch leaves all groups to NCCL: "
    assert capfd.readouterr().err.startswith(f"{begin}{said}")


def test_a_rank_that_the_plan_does_not_fit_switches_it_off_for_all(plan_dir, monkeypatch, capfd):
    members = told(plan_dir, GPUS, host="gpu07 boot")
    members[2] = msgspec.structs.replace(members[2], off="GPU 2 was a and is b")
    rank = Rank(monkeypatch, members)
    stock_everywhere(rank, plan_dir, capfd, "rank 2 on gpu07: GPU 2 was a and is b")


def test_only_rank_0_says_that_it_is_off(plan_dir, monkeypatch, capfd):
    members = told(plan_dir, GPUS)
    members[2] = msgspec.structs.replace(members[2], off="x")
    rank = Rank(monkeypatch, members, 1)
    tccl_py.torch.init_process_group(plan_dir)
    assert rank.graphs == [((0, 1, 2, 3), None)]
    assert capfd.readouterr().err == ""


def measured(directory):
    plan = msgspec.structs.replace(box_plan(), simulated=False, assumed=False)
    write_plan(plan, directory, fingerprint=PRINT)
    return directory


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu_uuids": ("GPU-0", "GPU-9", "GPU-2", "GPU-3")}, "GPU 1 was GPU-1 and is GPU-9"),
        ({"driver": "590.1"}, "the driver was 580.1 and is 590.1"),
        ({"numa_count": 1}, "it had 2 NUMA node(s) and has 1"),
    ],
)
def test_a_measured_plan_is_off_on_another_machine(tmp_path, monkeypatch, capfd, changes, said):
    directory = measured(tmp_path)
    rank = Rank(monkeypatch, told(directory, GPUS))
    now = msgspec.structs.replace(PRINT, **changes)
    rank.fingerprint = now
    name = host_identity().partition(" ")[0]
    stock_everywhere(rank, directory, capfd, f"rank 0 on {name}: {said}")


def test_a_plan_of_an_equal_host_is_on_if_that_is_said(tmp_path, monkeypatch, capfd):
    directory = measured(tmp_path)
    monkeypatch.setenv("TCCL_ALIKE", "1")
    rank = Rank(monkeypatch, told(directory, GPUS))
    now = msgspec.structs.replace(PRINT, gpu_uuids=("GPU-5", "GPU-6", "GPU-7", "GPU-8"))
    # Of the machine's own GPUs only name, index and bus id are looked at, which are NVML's too.
    gpus = box_plan().machine.gpus
    rank.fingerprint, rank.gpus = now, gpus
    tccl_py.torch.init_process_group(directory)
    assert rank.graphs == [((0, 1, 2, 3), str(directory / "nccl" / "graph.xml"))]
    assert capfd.readouterr().err == ""


def test_a_measured_plan_is_on_where_it_was_measured(tmp_path, monkeypatch, capfd):
    directory = measured(tmp_path)
    rank = Rank(monkeypatch, told(directory, GPUS))
    tccl_py.torch.init_process_group(directory)
    assert rank.graphs == [((0, 1, 2, 3), str(directory / "nccl" / "graph.xml"))]
    assert capfd.readouterr().err == ""


def test_a_plan_for_another_nccl_is_off(plan_dir, monkeypatch, capfd):
    rank = Rank(monkeypatch, told(plan_dir, GPUS), version=(2, 28, 9))
    name = host_identity().partition(" ")[0]
    why = "it is for NCCL 2.30 and this is 2.28.9 (plan again by `tccl plan DIR "
    stock_everywhere(rank, plan_dir, capfd, f"rank 0 on {name}: {why}")


@pytest.mark.parametrize("place", ["environment", "file"])
def test_a_plan_is_off_under_other_settings(plan_dir, monkeypatch, capfd, tmp_path, place):
    if place == "environment":
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    else:
        (tmp_path / "no.conf").write_text("NCCL_P2P_DISABLE=1\n")
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    name = host_identity().partition(" ")[0]
    why = "NCCL_P2P_DISABLE is set to something else than the plan's settings"
    stock_everywhere(rank, plan_dir, capfd, f"rank 0 on {name}: {why}")


def test_the_plans_own_settings_in_the_environment_are_no_reason(plan_dir, monkeypatch):
    for name, value in environment(box_plan().settings).items():
        monkeypatch.setenv(name, value)
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    tccl_py.torch.init_process_group(plan_dir)
    assert rank.graphs[0][1] == file_for(plan_dir, GPUS)


def test_two_ranks_on_one_gpu_are_left_to_torch(plan_dir, monkeypatch, capfd):
    members = told(plan_dir, (0, 0, 1, 2), host="gpu07 boot")
    monkeypatch.setattr("tccl_py.torch.groups.host_identity", lambda: "gpu07 boot")
    rank = Rank(monkeypatch, members, 1)
    tccl_py.torch.init_process_group(plan_dir)
    # No collective was forced: ranks may still choose their devices.
    assert rank.distributed.made[0].seen is None
    assert "ranks 0 and 1 both have GPU 0" in why_off(members)


def test_without_a_plan_named_anywhere_all_is_stock(monkeypatch, capfd):
    members = [Member(host="h", gpu=one, off="x") for one in GPUS]
    rank = Rank(monkeypatch, members)
    stock_everywhere(rank, None, capfd, f"rank 0 on {shown()}: TCCL_PLAN names no plan")


def shown():
    return host_identity().partition(" ")[0]


def test_the_plan_may_be_named_by_the_environment(plan_dir, monkeypatch):
    monkeypatch.setenv("TCCL_PLAN", str(plan_dir))
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    tccl_py.torch.init_process_group()
    assert rank.graphs[0][1] == file_for(plan_dir, GPUS)


def test_ranks_whose_plans_have_other_settings_use_none(plan_dir, monkeypatch, capfd):
    members = told(plan_dir, GPUS)
    members[3] = msgspec.structs.replace(members[3], settings={"NCCL_BUFFSIZE": "1024"})
    rank = Rank(monkeypatch, members)
    stock_everywhere(rank, plan_dir, capfd, "ranks 0 and 3 have plans of different settings")


def test_ranks_of_one_group_with_different_files_use_none(plan_dir, monkeypatch):
    members = told(plan_dir, GPUS)
    members[3] = msgspec.structs.replace(members[3], plan="another")
    rank = Rank(monkeypatch, members)
    tccl_py.torch.init_process_group(plan_dir)
    tccl_py.torch.new_group([0, 1])
    tccl_py.torch.new_group([0, 3])
    assert [graph for _, graph in rank.graphs] == [None, file_for(plan_dir, (0, 1)), None]


def test_a_graph_that_was_in_the_environment_is_told_of(plan_dir, monkeypatch, capfd):
    monkeypatch.setenv(GRAPH, "/mine.xml")
    Rank(monkeypatch, told(plan_dir, GPUS))
    tccl_py.torch.init_process_group(plan_dir)
    assert os.environ[GRAPH] == "/mine.xml"
    assert capfd.readouterr().err.startswith("tccl: NCCL_GRAPH_FILE is set")


# mistakes


def test_a_rank_without_the_plan_leaves_all_groups_to_nccl(plan_dir, monkeypatch, tmp_path, capfd):
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    stock_everywhere(rank, tmp_path, capfd, f"rank 0 on {shown()}: {tmp_path}: ")
    assert "NCCL_P2P_LEVEL" not in os.environ


def test_a_file_of_nccls_that_names_a_graph_is_told_of(plan_dir, monkeypatch, tmp_path, capfd):
    (tmp_path / "no.conf").write_text("\nNCCL_GRAPH_FILE=/x\n")
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    why = f"rank 0 on {shown()}: {tmp_path}/no.conf:2 sets NCCL_GRAPH_FILE"
    stock_everywhere(rank, plan_dir, capfd, why)


def other_settings(directory):
    plan = box_plan()
    changed = msgspec.structs.replace(plan.settings, buffsize=1 << 21)
    write_plan(msgspec.structs.replace(plan, settings=changed), directory)
    return directory


def test_a_second_plan_of_other_settings_is_off(plan_dir, monkeypatch, tmp_path, capfd):
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    tccl_py.torch.init_process_group(plan_dir)
    tccl_py.torch.init_process_group(other_settings(tmp_path))
    assert rank.graphs[1][1] is None
    assert "this process has other settings" in capfd.readouterr().err
    assert "NCCL_BUFFSIZE" not in os.environ


def test_a_second_plan_of_the_same_settings_is_used(plan_dir, monkeypatch, tmp_path):
    write_plan(box_plan(), tmp_path)
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    tccl_py.torch.init_process_group(plan_dir)
    # Its digest is another, because the files lie elsewhere: the others have it too.
    for number, one in enumerate(told(tmp_path, GPUS)):
        if number:
            rank.distributed.store.others[number] = msgspec.to_builtins(one)
    tccl_py.torch.init_process_group(tmp_path)
    tccl_py.torch.new_group([0, 2])
    assert [graph for _, graph in rank.graphs[1:]] == [
        file_for(tmp_path, GPUS),
        file_for(tmp_path, (0, 2)),
    ]


def test_a_process_that_begins_again_uses_the_keys_of_a_new_process(plan_dir, monkeypatch):
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    tccl_py.torch.init_process_group(plan_dir)
    tccl_py.torch.init_process_group(plan_dir)
    assert rank.distributed.store.prefixes == ["tccl", "default_pg"] * 2


def of_earlier_plan(directory):
    """Ranks without a plan; that of rank 1 had this one before."""
    members = [Member(host=host_identity(), gpu=gpu, off="x") for gpu in GPUS]
    read = settings_of(open_plan(directory))
    members[1] = msgspec.structs.replace(members[1], read=read, by_plan=tuple(read))
    return members


def test_a_new_process_takes_the_variables_that_others_have_for_good(plan_dir, monkeypatch, capfd):
    Rank(monkeypatch, of_earlier_plan(plan_dir))
    tccl_py.torch.init_process_group()
    variables = environment(box_plan().settings)
    assert {name: os.environ.get(name) for name in variables} == variables
    assert capfd.readouterr().err.endswith(f"; it has {shell_text(variables)} of an earlier plan\n")


@pytest.mark.parametrize("at", [0, 1])
def test_processes_that_have_unlike_variables_for_good_make_no_group(plan_dir, monkeypatch, at):
    members = of_earlier_plan(plan_dir)
    members[0] = msgspec.structs.replace(members[0], read={})
    rank = Rank(monkeypatch, members, at)
    groups.STATE.settings = members[at].read
    with pytest.raises(InputError, match="NCCL_P2P_LEVEL"):
        tccl_py.torch.init_process_group()
    assert rank.distributed.made == []


def test_a_process_tells_what_its_nccl_has_read(plan_dir, monkeypatch):
    monkeypatch.setenv("NCCL_CROSS_NIC", "1")
    rank = Rank(monkeypatch, told(plan_dir, GPUS), 1)
    tccl_py.torch.init_process_group(plan_dir)
    assert rank.distributed.store.own["read"] is None
    tccl_py.torch.init_process_group()
    variables = environment(box_plan().settings)
    own = rank.distributed.store.own
    assert own["by_plan"] == list(variables)
    assert own["read"].items() > {**variables, "NCCL_CROSS_NIC": "1"}.items()


def test_groups_need_a_default_group_that_was_made_here(monkeypatch, plan_dir):
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    rank.distributed.init_process_group()
    for action in (tccl_py.torch.new_group, tccl_py.torch.split_group):
        with pytest.raises(InputError) as error:
            action()
        assert error.value.where == "the default group"


def test_a_store_needs_a_rank(monkeypatch, plan_dir):
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    with pytest.raises(InputError, match="store"):
        tccl_py.torch.init_process_group(plan_dir, store=rank.distributed.store)


def test_without_torch_there_is_a_sentence(monkeypatch):
    import sys  # noqa: PLC0415

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError) as error:
        tccl_py.torch.init_process_group()
    assert "torch: is not installed" in str(error.value)


def test_jobs_without_nccl_are_left_alone(monkeypatch, plan_dir):
    monkeypatch.setenv(GRAPH, "/mine.xml")
    rank = Rank(monkeypatch, told(plan_dir, GPUS), when="at once", available=False)
    tccl_py.torch.init_process_group(plan_dir, "gloo")
    tccl_py.torch.new_group([0, 1])
    assert rank.graphs == [((0, 1, 2, 3), "/mine.xml"), ((0, 1), "/mine.xml")]
    assert os.environ[GRAPH] == "/mine.xml"
    assert "NCCL_P2P_LEVEL" not in os.environ
    # torch itself says what cannot be split.
    tccl_py.torch.split_group(split_ranks=[[0, 1]])
    assert rank.graphs[-1] == ((0, 1), "/mine.xml")


def test_ranks_that_there_are_not_are_left_to_torch(monkeypatch, plan_dir):
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    tccl_py.torch.init_process_group(plan_dir)
    tccl_py.torch.new_group([0, 99])
    assert rank.distributed.made[-1].ranks == (0, 99)


# several hosts


@pytest.fixture
def cluster(tmp_path):
    """A plan over hosts gpu3 (4 GPUs), gpu2 (2), gpu1 (4), login (1), in that order."""
    plan = mixed()
    write_plan(plan, tmp_path)
    return plan, tmp_path


def cluster_members(plan, directory, order=None):
    opened = open_plan(directory)
    gpus = {host.name: plan.gpus_of(host) for host in plan.hosts}
    return [
        Member(
            host=f"{name} boot",
            name=name,
            gpu=gpu,
            plan=opened.identity,
            settings=settings_of(opened),
        )
        for name in order or plan.host_order
        for gpu in gpus[name]
    ]


def cluster_rank(monkeypatch, members, rank):
    monkeypatch.setattr("tccl_py.torch.groups.host_identity", lambda: members[rank].host)
    monkeypatch.setattr(
        "tccl_py.delivery.fit.names_of_this_host", lambda: iter([members[rank].name])
    )
    return Rank(monkeypatch, members, rank)


@pytest.mark.parametrize("at", [0, 4, 7, 10])
def test_all_ranks_of_a_clusters_plan_see_the_file_of_their_host(cluster, monkeypatch, at):
    plan, directory = cluster
    members = cluster_members(plan, directory)
    rank = cluster_rank(monkeypatch, members, at)
    tccl_py.torch.init_process_group(directory)
    tccl_py.torch.new_group([at, (at + 1) % len(members)])
    tccl_py.torch.new_group()
    own = str(directory / "nccl" / "hosts" / f"{members[at].name}.xml")
    assert [graph for _, graph in rank.graphs] == [own, None, own]
    assert os.environ["NCCL_NET_DISABLE_INTRA"] == "1"
    del os.environ["NCCL_NET_DISABLE_INTRA"]


def test_a_host_with_other_gpus_switches_a_measured_clusters_plan_off(tmp_path, monkeypatch, capfd):
    plan = mixed(simulated=False, assumed=False)
    write_plan(plan, tmp_path)
    rank = cluster_rank(monkeypatch, cluster_members(plan, tmp_path), 0)
    gpus = plan.cluster.classes[plan.cluster.host_classes["gpu3"]].machine.gpus
    now = (*gpus[:3], msgspec.structs.replace(gpus[3], name="NVIDIA A40"))
    rank.gpus = now
    tccl_py.torch.init_process_group(tmp_path)
    assert rank.graphs[0][1] is None
    said = capfd.readouterr().err
    assert said.endswith("rank 0 on gpu3: GPU 3 was unnamed and is NVIDIA A40\n")


@pytest.mark.parametrize("change", ["order", "gpus", "fewer", "mixed up"])
def test_a_clusters_plan_is_for_its_own_order_of_hosts_only(cluster, change):
    plan, directory = cluster
    opened = open_plan(directory)
    members = cluster_members(plan, directory)
    assert opened.graph(members, members[0]) is not None
    if change == "order":
        members = cluster_members(plan, directory, ("gpu1", "gpu2", "gpu3", "login"))
    elif change == "gpus":
        members[0] = msgspec.structs.replace(members[0], gpu=7)
    elif change == "fewer":
        members = members[:-1]
    else:
        members[3], members[4] = members[4], members[3]
    assert opened.graph(members, members[0]) is None


def test_ranks_of_a_host_may_stand_in_any_order(cluster):
    plan, directory = cluster
    members = cluster_members(plan, directory)
    members[:4] = members[3::-1]
    assert open_plan(directory).graph(members, members[5]).name == "gpu2.xml"


@pytest.mark.parametrize("change", ["host", "file"])
def test_a_host_without_a_file_switches_a_clusters_plan_off(cluster, monkeypatch, capfd, change):
    plan, directory = cluster
    members = cluster_members(plan, directory)
    rank = cluster_rank(monkeypatch, members, 0)
    path = directory / "nccl" / "hosts" / "gpu3.xml"
    if change == "host":
        monkeypatch.setattr("tccl_py.delivery.fit.names_of_this_host", lambda: iter(["other"]))
        said = "the plan has no such host"
    else:
        path.unlink()
        said = f"{path}: is missing"
    tccl_py.torch.init_process_group(directory)
    assert rank.graphs[0][1] is None
    assert f"rank 0 on gpu3: {said}" in capfd.readouterr().err


def test_groups_of_two_hosts_do_not_use_a_plan_of_one_machine(plan_dir, monkeypatch):
    members = [*told(plan_dir, (0, 1), host="a b"), *told(plan_dir, (2, 3), host="c d")]
    monkeypatch.setattr("tccl_py.torch.groups.host_identity", lambda: "a b")
    rank = Rank(monkeypatch, members)
    tccl_py.torch.init_process_group(plan_dir)
    tccl_py.torch.new_group([0, 1])
    tccl_py.torch.new_group([0, 2])
    assert [graph for _, graph in rank.graphs] == [None, file_for(plan_dir, (0, 1)), None]


def test_settings_without_a_plan_do_not_hold_for_one_that_comes_later(plan_dir, monkeypatch, capfd):
    rank = Rank(monkeypatch, told(plan_dir, GPUS))
    tccl_py.torch.init_process_group()
    why = "this process has other settings, which its NCCL has read for good"
    tccl_py.torch.init_process_group(plan_dir)
    assert [graph for _, graph in rank.graphs] == [None, None]
    assert f"rank 0 on {shown()}: {why}" in capfd.readouterr().err
