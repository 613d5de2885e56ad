"""`tccl run`: a job in the environment of a plan, with its own exit code."""

import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from tccl_py.nccl.plugin import LIBRARY
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.retuning import retune
from tests.planned import SMALL, needing_a_graph, plan_of, replace_plan


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("plan")
    write_plan(plan_of(SMALL), place)
    return place


def run(*arguments, **variables):
    clean = {name: text for name, text in os.environ.items() if not name.startswith("NCCL_")}
    return subprocess.run(
        [sys.executable, "-m", "tccl_py", "run", *map(str, arguments)],
        env={**clean, **variables}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def variables_of(*arguments, **variables):
    text = run(*arguments, "--", "env", **variables).stdout
    pairs = (line.partition("=") for line in text.splitlines() if line.startswith("NCCL_"))
    return {name: value for name, _, value in pairs}


def test_the_job_has_the_choices_variables_and_its_own_exit_code(directory):
    done = run(directory, "--choice", "graph", "--", "sh", "-c", "echo $NCCL_GRAPH_FILE; exit 7")
    assert (done.returncode, done.stdout) == (7, f"{directory}/nccl/graph.xml\n")


def test_a_users_variables_stay_and_a_contradiction_disables_the_plan(directory):
    words = (directory, "--choice", "graph")
    kept = variables_of(*words, NCCL_DEBUG="WARN")
    assert kept["NCCL_DEBUG"] == "WARN"
    assert "NCCL_GRAPH_FILE" in kept
    assert variables_of(*words, NCCL_SHM_DISABLE="1") == {"NCCL_SHM_DISABLE": "1"}
    assert "NCCL_SHM_DISABLE" in run(*words, "--", "true", NCCL_SHM_DISABLE="1").stderr


def test_lines_of_nccls_files_that_contradict_the_plan_disable_it_and_are_named(
    directory, tmp_path
):
    conf = tmp_path / "nccl.conf"
    words, own = (directory, "--choice", "graph"), {"NCCL_CONF_FILE": str(conf)}
    conf.write_text("NCCL_DEBUG=WARN\n")
    assert "NCCL_GRAPH_FILE" in variables_of(*words, **own)
    conf.write_text("# mine\nNCCL_SHM_DISABLE=1\n")
    assert variables_of(*words, **own) == own
    assert f"NCCL_SHM_DISABLE ({conf}:2)" in run(*words, "--", "true", **own).stderr


def test_env_names_what_contradicts_the_plan_and_is_not_replaced_by_what_it_exports(
    directory, tmp_path
):
    place = tmp_path / "plan"
    place.mkdir()
    plan = plan_of(SMALL)
    larger = replace(plan.settings, buffsize=1 << 20)
    variables = replace(plan.choices["variables"], settings=larger, predicted_gbps=plan.rate_gbps)
    write_plan(replace_plan(retune(plan, larger), variables=variables), place)

    def errors(choice="graph", **own):
        clean = {name: text for name, text in os.environ.items() if not name.startswith("NCCL_")}
        command = [sys.executable, "-m", "tccl_py", "env", place, "--choice", choice]
        done = subprocess.run(
            command, env={**clean, **own}, capture_output=True, text=True, check=True
        )
        assert ("export NCCL_GRAPH_FILE" in done.stdout) == (choice == "graph")
        return done.stderr

    conf = tmp_path / "nccl.conf"
    conf.write_text("NCCL_SHM_DISABLE=1\n")
    assert f"NCCL_SHM_DISABLE ({conf}:1)" in errors(NCCL_CONF_FILE=str(conf))
    conf.write_text("NCCL_GRAPH_FILE=/other\n")
    # What is exported wins over the file, and what is unset does not.
    assert errors(NCCL_CONF_FILE=str(conf)) == ""
    assert f"NCCL_GRAPH_FILE ({conf}:1)" in errors("variables", NCCL_CONF_FILE=str(conf))
    assert "NCCL_SHM_DISABLE" in errors(NCCL_SHM_DISABLE="1")
    assert errors() == ""
    for name, own in {"NCCL_GRAPH_FILE": "/other", "NCCL_BUFFSIZE": "65536"}.items():
        assert f"replaces your '{own}'" in errors(**{name: own})
    assert errors(NCCL_BUFFSIZE=str(larger.buffsize)) == ""
    assert "your environment has NCCL_ALGO: jobs may run other" in errors(NCCL_ALGO="Tree")


def test_a_users_choice_of_algorithm_or_channels_stays_and_is_said(directory):
    words = (directory, "--choice", "graph")
    done = run(*words, "--", "env", NCCL_ALGO="Tree", NCCL_MAX_NCHANNELS="2", NCCL_DEBUG="WARN")
    assert "NCCL_ALGO=Tree" in done.stdout and "NCCL_GRAPH_FILE" in done.stdout
    assert "your environment has NCCL_ALGO, NCCL_MAX_NCHANNELS: jobs may run" in done.stderr
    # Default NCCL runs what its user chose without a plan, too.
    assert run(directory, "--choice", "default", "--", "true", NCCL_ALGO="Tree").stderr == ""


def test_a_job_that_sees_some_of_the_gpus_gets_no_graph_file_of_all(directory, tmp_path):
    words, gpus = (directory, "--choice", "graph"), load_plan(directory).gpus
    whole = {"NCCL_GRAPH_FILE": f"{directory}/nccl/graph.xml"}

    def got(visible, **more):
        return variables_of(*words, CUDA_VISIBLE_DEVICES=visible, **more).get("NCCL_GRAPH_FILE")

    seen = ",".join(map(str, gpus[:2]))
    done = run(*words, "--", "env", CUDA_VISIBLE_DEVICES=seen)
    assert f"a job over GPUs {seen}" in done.stderr
    assert got(seen) == variables_of(*words, "--gpus", seen).get("NCCL_GRAPH_FILE") != whole
    assert got("5,77") is None
    # All of them, or not known.
    for visible in (", ".join(map(str, gpus[::-1])), ""):
        assert got(visible) == whole["NCCL_GRAPH_FILE"]
    # One, and those in words that only CUDA understands.
    assert got("MIG-1") is got(str(gpus[0])) is None
    # A rank may see its own alone, among those of the plan.
    assert got(str(gpus[1]), LOCAL_RANK="1") == whole["NCCL_GRAPH_FILE"]
    assert got("77", LOCAL_RANK="1") is None
    # A host's only rank may start the others.
    only = {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    assert got(seen, **only) == got(seen)
    # A batch script is no rank.
    assert got(seen, SLURM_LOCALID="0", SLURM_TASKS_PER_NODE="8") == got(seen)


def launcher(path):
    """A program that prints its environment, under a launcher's name."""
    path.write_text("#!/bin/sh\nenv\n")
    path.chmod(0o755)
    return path


def test_torchrun_says_how_many_ranks_it_starts_and_on_how_many_hosts(directory, tmp_path):
    program, count = launcher(tmp_path / "torchrun"), len(load_plan(directory).gpus)

    def said(*options, **variables):
        done = run(directory, "--choice", "graph", "--", program, *options, **variables)
        assert done.returncode == 0
        return "NCCL_GRAPH_FILE" in done.stdout, done.stderr

    assert said(f"--nproc-per-node={count}", "train.py") == (True, "")
    assert said("--nproc_per_node", "gpu", "train.py") == (True, "")
    has_file, why = said("--nproc_per_node", "2", "train.py")
    assert not has_file and "torchrun --nproc_per_node says 2" in why
    assert not said("train.py", PET_NPROC_PER_NODE="1")[0]
    assert "torchrun --nnodes says 4" in said("--nnodes=1:4", "train.py")[1]


def test_mpirun_says_how_many_ranks_it_starts_and_those_of_other_hosts_have_no_variables(
    directory, tmp_path
):
    program, count = launcher(tmp_path / "mpirun"), len(load_plan(directory).gpus)

    def said(*options):
        done = run(directory, "--choice", "graph", "--", program, *options, "train.py")
        assert done.returncode == 0
        return done.stdout.count("NCCL_"), done.stderr

    of_all = said("-n", str(count))
    assert of_all[0] > 0 and of_all[1] == ""
    some, why = said("-n", "2")
    assert some == of_all[0] - 1 and "mpirun -n says 2" in why
    none, why = said("-H", f"a:{count},b:{count}", "-n", str(2 * count))
    assert none == 0 and "mpirun -H says 2" in why


def test_a_users_contradiction_is_named_with_the_plugin_too(tmp_path):
    write_plan(needing_a_graph(plan_of(SMALL)), tmp_path)
    (tmp_path / "nccl" / LIBRARY).touch(mode=0o644)
    done = run(tmp_path, "--plugin", "--", "env", NCCL_SHM_DISABLE="1")
    assert (done.returncode, "NCCL_ENV_PLUGIN" in done.stdout) == (0, True)
    assert "the plugin leaves jobs to NCCL" in done.stderr and "NCCL_SHM_DISABLE" in done.stderr
    assert "leaves jobs" not in run(tmp_path, "--plugin", "--", "env").stderr


def test_a_graph_file_of_the_plan_in_the_environment_is_not_the_users(directory):
    own = {"NCCL_GRAPH_FILE": f"{directory}/nccl/hosts/other.xml"}
    assert "NCCL_GRAPH_FILE" not in variables_of(directory, "--choice", "variables", **own)
    words = (directory, "--choice", "graph")
    assert variables_of(*words, **own)["NCCL_GRAPH_FILE"] == f"{directory}/nccl/graph.xml"


def test_fewer_ranks_on_the_host_than_gpus_get_no_graph_file_of_all(directory):
    words, count = (directory, "--choice", "graph"), len(load_plan(directory).gpus)

    def has_file(*more, **variables):
        return "NCCL_GRAPH_FILE" in variables_of(*words, *more, **variables)

    two = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert count > 2 and not has_file(**two)
    said = run(*words, "--", "true", **two).stderr
    assert f"it is for {count} GPUs of this host, and OMPI_COMM_WORLD_LOCAL_SIZE says 2" in said
    # A rank on each, one that starts the others itself, ranks of GPUs that are named.
    assert has_file(LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(count))
    assert has_file(**two | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert has_file("--gpus", ",".join(map(str, range(count))), **two)


def test_ranks_on_other_hosts_too_get_no_graph_file_of_one(directory, tmp_path):
    words, count = (directory, "--choice", "graph"), len(load_plan(directory).gpus)
    two = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(count), "WORLD_SIZE": str(2 * count)}
    for own in ((), ("--gpus", ",".join(map(str, range(count))))):
        done = run(*words, *own, "--", "env", **two)
        assert "other hosts have ranks too (LOCAL_WORLD_SIZE says" in done.stderr
        assert "NCCL_GRAPH_FILE" not in done.stdout
    # Other hosts have other GPUs than a measured plan, and would get no variables.
    measured = tmp_path / "measured"
    measured.mkdir()
    write_plan(replace_plan(load_plan(directory), simulated=False, assumed=False), measured)
    away = run(measured, "--choice", "graph", "--", "env", **two)
    assert "the plan is disabled" in away.stderr and "NCCL_" not in away.stdout
    assert "the plan is disabled" in run(measured, "--alike", "--", "true", **two).stderr
    # A rank of each host that starts the others.
    each = {"LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert "other hosts have ranks too" in run(*words, "--", "true", **each).stderr


def test_another_graph_file_of_the_user_disables_the_plan(directory):
    words, own = (directory, "--choice", "graph"), {"NCCL_GRAPH_FILE": "/mine.xml"}
    assert variables_of(*words, **own) == own
    assert "another NCCL_GRAPH_FILE" in run(*words, "--", "true", **own).stderr
    planned = variables_of(*words)
    assert variables_of(*words, **planned) == planned


def test_a_job_over_other_gpus_than_the_plans_gets_no_graph_file(directory):
    assert "NCCL_GRAPH_FILE" not in variables_of(directory, "--gpus", "0")


NO_PROGRAMS = [
    ((), 2),
    (("",), 127),
    (("no-such-program",), 127),
    (("/",), 126),
    ((__file__,), 126),
]


@pytest.mark.parametrize(("command", "code"), NO_PROGRAMS)
def test_what_is_no_program_is_refused_in_one_line_with_a_shells_exit_code(
    command, code, directory
):
    done = run(directory, "--", *command)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert "Errno" not in done.stderr


def test_what_is_missing_on_the_command_line_is_named(tmp_path):
    assert run().stderr.startswith("tccl: DIR: is missing; ")
    done = run("--record", tmp_path / "job.json")
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert done.stderr.startswith("tccl: COMMAND: is missing; name a program after --")
    assert "COMMAND: is missing; name a plan and a program" in run("--", "true").stderr


def test_a_job_ends_as_usual_where_nobody_reads_its_output(directory):
    done = run(directory, "--", "sh", "-c", "yes | head -n 1; echo done >&2")
    assert (done.returncode, done.stdout, done.stderr[-5:]) == (0, "y\n", "done\n")
