"""What holds for the files of any plan, of one host and of several."""

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.plan.directory import machine_file, write_nccl_files, write_new_plan, write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.staging import check_files
from tccl_py.planning.planner import make_plan
from tccl_py.simulator.descriptions import load_bundled, model_for, read_description
from tccl_py.simulator.source import Simulator
from tests.cluster_plans import equal_hosts, mixed
from tests.planned import PCIE, SMALL, plan_of, replace_plan

PLANS = {
    "one host": (lambda: plan_of(PCIE), lambda: plan_of(SMALL)),
    "several hosts": (mixed, lambda: equal_hosts(12)),
    "several hosts in the place of one": (lambda: plan_of(SMALL), mixed),
}


@pytest.fixture(params=PLANS)
def plans(request):
    """A plan, and another for its place."""
    return [make() for make in PLANS[request.param]]


def texts(place):
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def full_disk(at):
    """Lets the n-th file that is made safe fail as on a full disk."""
    made = []

    def fsync(descriptor):
        made.append(descriptor)
        if len(made) == at:
            raise OSError(28, "No space left on device")

    return fsync


def test_a_written_plan_is_read_as_it_was_and_all_its_files_are_its_own(plans, tmp_path):
    plan, _ = plans
    write_plan(plan, tmp_path)
    check_files(tmp_path)
    assert load_plan(tmp_path) == plan


def test_machines_are_kept_with_the_models_that_rates_come_from(plans, tmp_path):
    plan, _ = plans
    first = plan.cluster.classes[0]
    model = model_for(first.machine, first.knowledge)
    for models, kept in (({}, None), ({first.machine.name: model}, model)):
        write_plan(plan, tmp_path, models=models)
        read = read_description(machine_file(plan, tmp_path, 0))
        assert (read.machine, read.model) == (first.machine, kept)


@pytest.mark.parametrize("at", [1, 4, 5, 6])
def test_a_full_disk_leaves_the_plan_that_was_there(at, plans, tmp_path, monkeypatch):
    plan, other = plans
    write_plan(plan, tmp_path)
    before = texts(tmp_path)
    monkeypatch.setattr("os.fsync", full_disk(at))
    with pytest.raises(InputError, match="No space left on device"):
        write_plan(other, tmp_path)
    assert texts(tmp_path) == before


@pytest.mark.parametrize("there", [False, True])
def test_a_plan_that_could_not_be_read_again_is_not_put_in_place(there, plans, tmp_path):
    plan, other = plans
    if there:
        write_plan(plan, tmp_path)
    before = texts(tmp_path)
    with pytest.raises(InputError, match="the plan could"):
        write_plan(msgspec.structs.replace(other, sets_measured=-1), tmp_path)
    assert texts(tmp_path) == before


def test_one_plan_replaces_another_with_all_its_files_and_findings(plans, tmp_path):
    plan, other = plans
    (fresh := tmp_path / "fresh").mkdir()
    (used := tmp_path / "used").mkdir()
    write_plan(other, fresh)
    write_plan(plan, used)
    for name in ("verify.json", "explanation.json", "report.html", "notes.txt"):
        (used / name).write_text("of another plan")
    write_plan(other, used)
    names = [{str(path.relative_to(one)) for path in texts(one)} for one in (fresh, used)]
    assert names[1] - names[0] == {"notes.txt"} and names[0] < names[1]
    assert load_plan(used) == other


def test_exported_files_appear_together_or_not_at_all(plans, tmp_path, monkeypatch):
    plan, _ = plans
    place = tmp_path / "a" / "b"
    assert write_nccl_files(plan, place) == len(texts(place)) > 3
    assert [path.name for path in place.iterdir()] == ["nccl"]
    with pytest.raises(InputError, match=r"already exists; name a new"):
        write_nccl_files(plan, place)
    monkeypatch.setattr("os.fsync", full_disk(3))
    before = texts(tmp_path)
    with pytest.raises(InputError, match="No space left on device"):
        write_nccl_files(plan, tmp_path / "c" / "d")
    assert texts(tmp_path) == before
    assert not (tmp_path / "c").exists()


def test_a_plan_is_made_by_a_models_name_or_from_a_simulated_plans_directory(tmp_path):
    model = load_bundled(SMALL)
    made = make_plan(SMALL)
    assert made == make_plan(model.machine, model.knowledge, Simulator(model))
    (name,) = (one.name for one in made.cluster.classes)
    write_new_plan(made, tmp_path / "plan", models={name: model})
    assert make_plan(tmp_path / "plan") == made
    write_new_plan(replace_plan(made, simulated=False), tmp_path / "measured")
    with pytest.raises(InputError, match="measured"):
        make_plan(tmp_path / "measured")
    with pytest.raises(InputError, match="source"):
        make_plan(model.machine)
