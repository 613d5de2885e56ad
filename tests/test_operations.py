"""Files to run tccl on many machines: each parses, and names only what the product has."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tccl_py.cli.main import COMMANDS, load_command
from tccl_py.delivery.plugin import PLUGIN_VARIABLE
from tccl_py.experiments.comparison import Timed, single
from tccl_py.experiments.preflight import Preflight
from tccl_py.experiments.record import ArmResult
from tccl_py.health.drift import Comparison, Drift, prometheus_text
from tccl_py.model.transfer import parse_set
from tccl_py.nccl.plugin import LIBRARY
from tccl_py.nccl.plugin.index import INDEX_VARIABLE
from tccl_py.nccl.settings import Settings
from tccl_py.plan.load import load_plan
from tccl_py.plan.machine_files import ALIKE_INDEX_FILE
from tccl_py.report.check import preflight_metrics
from tests.skips import needs

ROOT = Path(__file__).parent.parent
FILES = ROOT / "examples" / "operations"
PAGE = (ROOT / "docs" / "operations.md").read_text()


def manifest(name):
    return yaml.safe_load((FILES / "kubernetes" / f"{name}.yaml").read_text())


def containers(found):
    pod = found["spec"]["template"]["spec"]
    return [*pod.get("initContainers", ()), *pod["containers"]], pod


def typed_commands():
    """Command lines of `tccl` in all files, with the file's name."""
    for path in sorted(FILES.rglob("*")):
        text = path.read_text().replace("{{ tccl }}", "tccl") if path.is_file() else ""
        for match in re.finditer(r"\btccl ([a-z]+) ([^\n#|]*)", text):
            if match[1] in COMMANDS:
                yield path.name, f"{match[1]} {match[2]}"
    for name in ("plan", "train", "check"):
        for container in containers(manifest(name))[0]:
            if container["image"] == "tccl" and "command" not in container:
                yield f"{name}.yaml", " ".join(container["args"])


def test_every_file_is_on_the_page_and_every_one_there_is():
    named = set(re.findall(r"^\| `([^|]+)` \|", PAGE, flags=re.MULTILINE))
    listed = {part.strip("`, ") for row in named for part in re.split(r"`, `", row)}
    names = {str(path.relative_to(FILES)) for path in FILES.rglob("*") if path.is_file()}
    assert {Path(name).name for name in listed} == {Path(name).name for name in names}


@pytest.mark.parametrize("file, line", list(typed_commands()))
def test_commands_and_options_exist(file, line):
    name, *words = line.split()
    options = {one for param in load_command(name).params for one in param.opts}
    assert {word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)} <= options, file


def test_commands_are_found_in_every_kind_of_file():
    assert {file for file, _ in typed_commands()} == {
        "Dockerfile", "check.yaml", "plan.yaml", "train.yaml", "playbook.yml", "tccl-check.service",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["plan", "train", "check"])
def test_manifests_mount_what_they_declare_and_share_memory(name):
    found = manifest(name)
    assert found["kind"] in ("Job", "DaemonSet")
    every, pod = containers(found)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in every:
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) <= set(volumes)
        if container["name"] != "unpack":
            assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
            assert mounts["shm"] == "/dev/shm"


@pytest.mark.parametrize(
    "planned, plans, verifies, good",
    [
        (False, 0, 0, True),
        (False, 2, 0, False),
        (True, 2, 0, True),
        (True, 2, 1, True),
        (True, 2, 2, False),
        (True, 2, 137, False),
    ],
)
def test_a_job_that_is_tried_again_verifies_the_plan_it_has(
    planned, plans, verifies, good, tmp_path
):
    (line,) = (container["args"][0] for container in containers(manifest("plan"))[0])
    if planned:
        (tmp_path / "plan").mkdir()
        (tmp_path / "plan" / "plan.json").touch()
    tccl = tmp_path / "tccl"
    tccl.write_text(
        f"#!/bin/sh\ncase $1 in plan) exit {plans} ;; verify) exit {verifies} ;; esac\n"
    )
    tccl.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-ec", line.replace("/opt/tccl", str(tmp_path))],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=False,
    )
    assert (done.returncode == 0) == good


def test_a_check_sees_the_processes_of_other_containers_that_use_gpus():
    every, pod = containers(manifest("check"))
    assert "nvidia-smi --query-compute-apps" in every[0]["args"][0]
    assert pod["hostPID"] is True


def test_the_config_map_of_the_job_is_unpacked_before_the_plugin_reads_it():
    every, pod = containers(manifest("train"))
    assert [container["name"] for container in every] == ["unpack", "preflight", "train"]
    variables = {one["name"]: one["value"] for one in every[-1]["env"]}
    assert Path(variables[PLUGIN_VARIABLE]).name == LIBRARY
    # The job may run on any node like the planned one.
    assert "--alike" in every[1]["args"][0]
    assert Path(variables[INDEX_VARIABLE]).name == ALIKE_INDEX_FILE
    assert "config" not in {mount["name"] for mount in every[-1]["volumeMounts"]}
    (generated,) = manifest("kustomization")["configMapGenerator"]
    assert generated["name"] == next(
        volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume
    )
    assert f"/config/{generated['files'][0]}" in every[0]["args"][0]
    assert {"train.yaml", "check.yaml"} == set(manifest("kustomization")["resources"])


WHOLE = '{\n "ok": false,\n "values_right": false,\n "findings": [\n  {"what": "}"}\n ]\n}\n'
ENDS = {
    "passed": (0, WHOLE.replace("false", "true"), False),
    "wrong values": (1, WHOLE, True),
    "less bandwidth": (1, WHOLE.replace('right": false', 'right": true'), False),
    "an answer without the verdict": (1, '{\n "drifted": true\n}\n', False),
    "an answer that is cut": (1, WHOLE[:30], False),
    "an exception of Python": (1, "", False),
    "wrong use": (2, "", False),
    "no such command": (127, "", False),
    "Ctrl-C": (130, "", False),
    "killed": (137, "", False),
    "killed after its answer": (137, WHOLE, False),
}


def recipes():
    """The shell lines that keep jobs off a node by a preflight, and where they stand."""
    page = (ROOT / "docs" / "commands" / "check.md").read_text()
    yield "check.md", re.findall(r"^out=\$\(tccl check .*scontrol.*$", page, flags=re.MULTILINE)
    every, _ = containers(manifest("train"))
    yield "train.yaml", [one["args"][0] for one in every if one["name"] == "preflight"]


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_node_is_kept_from_jobs_only_by_a_preflight_that_judged_it(tmp_path, case, shell):
    code, printed, bad = ENDS[case]
    (tmp_path / "printed").write_text(printed)
    stubs = {
        "tccl": f'cat "{tmp_path}/printed"; exit {code}',
        "scontrol": f'echo "$@" > "{tmp_path}/drained"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "gpu07"}
    for name, (line,) in recipes():
        done = subprocess.run([shell, "-c", line], env=environment, check=False)
        kept_off = done.returncode != 0
        if name == "check.md":
            # SLURM drains a node whose prolog fails, for whatever reason.
            assert not kept_off
            kept_off = (tmp_path / "drained").exists()
        assert kept_off == bad, name


def test_the_playbook_runs_in_order_and_copies_the_units_that_there_are():
    (play,) = yaml.safe_load((FILES / "playbook.yml").read_text())
    commands = [
        task["ansible.builtin.command"].split()[3]
        for task in play["tasks"]
        if "ansible.builtin.command" in task
    ]
    assert commands == ["doctor", "uninstall", "plan", "verify", "install"]
    # What an unchanged host says (`tccl install`) is no change.
    (installing,) = (task for task in play["tasks"] if task.get("register") == "installed")
    (said,) = re.findall("'(.+)' not in", installing["changed_when"])
    assert f"has the plan's {said}" in (ROOT / "tccl_py" / "cli" / "export.py").read_text()
    (copied,) = (task["loop"] for task in play["tasks"] if "loop" in task)
    assert all((FILES / name).is_file() for name in copied)


def test_the_dashboard_asks_only_for_metrics_that_a_check_has():
    text = (FILES / "grafana.json").read_text()
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    asked = set(re.findall(r"\btccl_[a-z_]+", text)) - {"tccl_check"}
    one = parse_set("G0->G0->G1")
    row = Comparison(transfers=one, flow=one.flows[0], was_gbps=2.0, is_gbps=1.0, p=0.001)
    drift = Drift(rows=(row,), changes=(row,), points_to="", lost={}, skipped=(), seconds=1.0)
    rows = (Timed(bytes=1, gbps=1.0, compared=single(0.5)),)
    arm = ArmResult(name="default", settings=Settings(), environment={}, rows=rows)
    found = Preflight(drift=drift, arm=arm, seconds=1.0)
    own = {"machine": "m", "simulated": "false"}
    printed = prometheus_text(drift, own, now=1.0) + preflight_metrics(found, own)
    assert asked <= set(re.findall(r"^# TYPE (\S+)", printed, flags=re.MULTILINE))
    for panel in panels:
        assert panel["targets"][0]["expr"]


def test_the_folder_of_the_metrics_is_made_before_the_check():
    text = (FILES / "tccl-check.service").read_text()
    (file,) = re.findall(r"-o (\S+?)'$", text, flags=re.MULTILINE)
    assert f"ExecStartPre=/bin/mkdir -p {Path(file).parent}\n" in text


def test_the_units_are_good(tmp_path):
    needs("systemd-analyze")
    for name in ("tccl-check.service", "tccl-check.timer"):
        shutil.copy(FILES / name, tmp_path)
    units = [str(tmp_path / name) for name in ("tccl-check.service", "tccl-check.timer")]
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_image_installs_an_extra_that_there_is_and_runs_the_command():
    text = (FILES / "Dockerfile").read_text()
    extras = re.findall(r"/src\[([a-z0-9,]+)\]", text)
    project = (ROOT / "pyproject.toml").read_text()
    assert extras
    for extra in extras[0].split(","):
        assert re.search(rf"^{extra} = \[", project, flags=re.MULTILINE)
    assert json.loads(text.partition("ENTRYPOINT ")[2].splitlines()[0]) == ["tccl"]


def test_the_image_has_no_complaint_of_hadolint():
    needs("hadolint")
    file = str(FILES / "Dockerfile")
    done = subprocess.run(["hadolint", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_expected_gains_are_those_of_the_reference_plans():
    text = (ROOT / "docs" / "features.md").read_text()
    rows = re.findall(
        r"^\| [^|]+ \| ([a-z0-9-]+) \| ([A-Za-z ]+) \| ([0-9.]+) \| simulated", text, re.MULTILINE
    )
    words = {"default": "default NCCL", "variables": "variables only", "graph": "graph file"}
    assert {name for name, *_ in rows} == {path.stem for path in (ROOT / "plans").glob("*.json")}
    for name, choice, gain in rows:
        plan = load_plan(ROOT / "plans" / f"{name}.json")
        assert choice == words[plan.recommended], name
        assert gain == f"{plan.gain(plan.recommended):.2f}", name
