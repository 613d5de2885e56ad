"""`tccl discover`: machines from files and from the host, and their JSON as a MACHINE."""

import json
import stat
from pathlib import Path

import pytest

from tccl_py.model.machine import (
    Fingerprint,
    HiddenLink,
    Knowledge,
    PeerAccess,
    description_to_json,
)
from tccl_py.simulator.descriptions import (
    bundled_names,
    load_bundled,
    load_machine,
    read_description,
)
from tests.commands import tccl
from tests.nccl_cases import CASES
from tests.toy import toy_machine

TOPOLOGY = CASES / "topologies" / "h200x4-vm.xml"
BOX = toy_machine(gpus=4, numa_nodes=2, per_switch=2)
NO_ACCESS = Knowledge(
    peer_access=(PeerAccess(source=0, target=1, supported=False, provenance="reported"),),
    hidden_links=(HiddenLink(one="0000:80:00.0", other="0000:81:00.0", provenance="reported"),),
)
FINGERPRINT = Fingerprint(gpu_uuids=("GPU-1",), driver="575.1", numa_count=2, kernel="6.8")

FACT = {"source": 7, "target": 0, "supported": True, "provenance": "reported"}


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


def test_a_device_is_written_to_and_not_replaced():
    assert tccl("discover", "--nccl-topology", TOPOLOGY, "-o", "/dev/null").exit_code == 0
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    assert tccl("discover", "--nccl-topology", TOPOLOGY, "-o", link).exit_code == 0
    assert link.is_symlink()
    assert len(json.loads(target.read_text())["gpus"]) == 4
