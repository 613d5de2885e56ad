"""`tccl discover`: machines from files and from the host, and their JSON as a MACHINE."""

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.errors import InputError
from tccl_py.model.machine import (
    Fingerprint,
    HiddenLink,
    Knowledge,
    PeerAccess,
    description_to_json,
)
from tccl_py.readers.nccl_topology import read_nccl_topology
from tccl_py.simulator.descriptions import (
    bundled_names,
    load_bundled,
    load_machine,
    read_description,
)
from tests.nccl_cases import CASES
from tests.toy import toy_machine

TOPOLOGY = CASES / "topologies" / "h200x4-vm.xml"
MATRIX = CASES / "h200x4-vm" / "topo-m.txt"
BOX = toy_machine(gpus=4, numa_nodes=2, per_switch=2)
NO_ACCESS = Knowledge(
    peer_access=(PeerAccess(source=0, target=1, supported=False, provenance="reported"),),
    hidden_links=(HiddenLink(one="0000:80:00.0", other="0000:81:00.0", provenance="reported"),),
)
FINGERPRINT = Fingerprint(gpu_uuids=("GPU-1",), driver="575.1", numa_count=2, kernel="6.8")

FACT = {"source": 7, "target": 0, "supported": True, "provenance": "reported"}


def tccl(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def described(text, tmp_path):
    path = tmp_path / "described.json"
    path.write_text(text)
    return read_description(path)


def test_a_topology_file_becomes_a_machine_on_stdout(tmp_path):
    result = tccl("discover", "--nccl-topology", TOPOLOGY)
    assert (result.exit_code, result.stderr) == (0, "")
    assert described(result.stdout, tmp_path).machine == read_nccl_topology(TOPOLOGY)


def test_a_matrix_of_nvidia_smi_becomes_a_machine_on_stdout(tmp_path):
    result = tccl("discover", "--nvidia-smi", MATRIX)
    assert result.exit_code == 0
    assert len(described(result.stdout, tmp_path).machine.gpus) == 4


@pytest.mark.parametrize("text", ["no xml", "", "<a b=1>", "<system>"])
def test_a_file_that_is_no_xml_is_said_to_be_none_once(text, tmp_path):
    path = tmp_path / "box.xml"
    path.write_text(text)
    result = tccl("discover", "--nccl-topology", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"tccl: {path}:1: is no XML (")
    assert result.stderr.count("well-formed") + result.stderr.count("line 1") <= 1


@pytest.mark.parametrize("option, file", [("--nccl-topology", TOPOLOGY), ("--nvidia-smi", MATRIX)])
def test_the_file_written_is_a_machine_for_every_command(option, file, tmp_path):
    path = tmp_path / "box.json"
    result = tccl("discover", option, file, "-o", path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"tccl: wrote {path}: {file.stem} with 4 GPUs\n"
    assert tccl("measure", "G0->G0->G1", "--simulate", path).exit_code == 0


def test_the_host_gives_knowledge_and_fingerprint_that_commands_use(monkeypatch, tmp_path):
    found = (BOX, NO_ACCESS, FINGERPRINT)
    monkeypatch.setattr("tccl_py.cli.machines.gpu_count", lambda: 2)
    monkeypatch.setattr("tccl_py.cli.machines.discover_machine", lambda: found)
    path = tmp_path / "box.json"
    result = tccl("discover")
    path.write_text(result.stdout)
    keys = list(json.loads(result.stdout))
    assert keys[-2:] == ["knowledge", "fingerprint"]
    model = load_machine(str(path))
    assert (model.machine, model.knowledge) == (BOX, NO_ACCESS)
    assert type(model.machine) is type(BOX)


def test_without_gpus_the_models_are_listed_unless_a_file_is_to_be_written(monkeypatch, tmp_path):
    def no_driver():
        raise InputError("this machine", "no NVIDIA driver answers", "use --nvidia-smi FILE")

    monkeypatch.setattr("tccl_py.cli.machines.gpu_count", no_driver)
    listed = tccl("discover")
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in bundled_names())
    assert "28 measured, 4 assumed" in listed.stdout
    found = json.loads(tccl("discover", "--json").stdout)
    keys = ["name", "gpus", "gpu", "numa_nodes", "nics", "figures", "note", "source"]
    assert [list(entry) for entry in found] == [keys] * len(bundled_names())
    assert list(found[0]["figures"]) == ["measured", "published", "assumed"]
    for result in (listed, tccl("discover", "-o", tmp_path / "box.json")):
        assert "NVIDIA driver answers; use" in result.stderr
    assert (result.exit_code, result.stdout) == (2, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", bundled_names())
def test_a_named_machine_is_shown_with_its_devices(name):
    result = tccl("discover", name)
    assert result.exit_code == 0
    assert all(f" {gpu.id} " in result.stdout for gpu in load_bundled(name).machine.gpus)
    assert json.loads(tccl("discover", name, "--json").stdout)["machine"]["name"] == name
    assert tccl("discover", name, "-o", "/dev/null").exit_code == 2


def test_a_description_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "box.json"
    for knowledge, fingerprint in ((None, None), (NO_ACCESS, None), (None, FINGERPRINT)):
        path.write_text(description_to_json(BOX, knowledge, fingerprint))
        found = read_description(path)
        assert (found.machine, found.knowledge) == (BOX, knowledge or Knowledge())


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"gpus": []}, "has no GPU"),
        ({"colour": 1}, "unknown field `colour`"),
        ({"format_version": 9}, "has format version 9"),
        ({"knowledge": {"peer_access": [FACT]}}, "speaks of GPU 7"),
    ],
)
def test_a_damaged_description_is_refused(change, sentence, tmp_path):
    path = tmp_path / "box.json"
    content = json.loads(description_to_json(BOX, NO_ACCESS, FINGERPRINT))
    path.write_text(json.dumps(content | change))
    result = tccl("discover", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"tccl: {path}: ")
    assert sentence in result.stderr


def test_nothing_is_written_where_the_input_is_bad(tmp_path):
    path = tmp_path / "box.json"
    assert tccl("discover", "--nccl-topology", MATRIX, "-o", path).exit_code == 2
    assert not path.exists()


def test_p2p_that_a_file_does_not_tell_is_printed_and_settled_by_the_user(tmp_path):
    path = tmp_path / "topo-m.txt"
    path.write_text("\tGPU0\tGPU1\nGPU0\tX\tPHB\nGPU1\tPHB\tX\n")
    guess = tccl("discover", "--nvidia-smi", path)
    assert guess.stderr.startswith("tccl: assumed: no P2P between 2 ordered pairs")
    assert json.loads(guess.stdout)["knowledge"]["peer_access_default"] is False
    told = tccl("discover", "--nvidia-smi", path, "--p2p", "yes")
    assert (told.exit_code, told.stderr) == (0, "")
    assert json.loads(told.stdout)["knowledge"]["peer_access_default"] is True
    for wrong in (["--p2p", "yes"], ["--nvidia-smi", path, "--p2p", "1"]):
        assert tccl("discover", *wrong).exit_code == 2


def test_a_device_is_written_to_and_not_replaced():
    assert tccl("discover", "--nccl-topology", TOPOLOGY, "-o", "/dev/null").exit_code == 0
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    assert tccl("discover", "--nccl-topology", TOPOLOGY, "-o", link).exit_code == 0
    assert link.is_symlink()
    assert len(json.loads(target.read_text())["gpus"]) == 4
