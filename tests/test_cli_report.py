"""`tccl report`: where the page goes, what it replaces, and what a bad directory gets."""

import json
import zipfile
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from tccl_py.experiments.record import Verification
from tccl_py.model.links import Proof
from tccl_py.plan.results import ProvenLinks
from tccl_py.report.bundle import write_bundle
from tests.commands import tccl
from tests.planned import SMALL
from tests.report_pages import plan_directory


@pytest.fixture
def directory(tmp_path):
    return plan_directory(tmp_path / "plan", SMALL)


def refused(directory, *arguments):
    """The sentence for a command line that must leave everything as it is."""
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    result = tccl("report", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return result.stderr


def test_a_link_to_a_report_stays_a_link(directory, tmp_path):
    tccl("report", directory)
    link = tmp_path / "latest.html"
    link.symlink_to(directory / "report.html")
    assert tccl("report", directory, "-o", link).exit_code == 0
    assert link.is_symlink()


def test_a_report_stays_where_writing_the_next_fails(directory, monkeypatch):
    tccl("report", directory)
    before = (directory / "report.html").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = tccl("report", directory)
    assert result.exit_code == 2
    assert "space left on device" in result.stderr
    assert (directory / "report.html").read_bytes() == before
    assert not list(directory.glob(".report*"))


def names_and_texts(archive):
    with zipfile.ZipFile(archive) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


VERIFIED = Path(__file__).parent / "cases" / "verification"
SECRETS = (
    *("GPU-3f1c2b4d-0000-4a5b-8c6d-7e8f90a1b2c3", "gpu-07.lab.example.org", "gpu-07", "leaf-a"),
    *("0x506b4b0300c2d3e4", "10.1.2.3", "fe80::1a2b:3c4d", "aa:bb:cc:dd:ee:ff"),
    *("/home/jane/plan/nccl/graph.xml", "jane", "root=UUID"),
)


def test_a_bundle_names_no_host_serial_number_address_or_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    place = plan_directory(tmp_path / "plan", "nvswitch-8gpu-8nic")
    words = " ".join(SECRETS[2:-1])
    for path in (place / "plan.json", *(place / "machines").glob("*.json")):
        held = json.loads(path.read_text())
        if path.name == "plan.json":
            host = held["cluster"]["hosts"][0]["name"]
            held["notices"] = [words]
            cluster = held["cluster"]
            cluster["switches"] = {"name": "leaf-a", "hosts": ["gpu-07.lab.example.org"]}
            text = json.dumps(held).replace(f'"name": "{host}"', '"name": "gpu-07.lab.example.org"')
        else:
            described = held.get("machine", held)
            described["nics"][0]["guid"] = "0x506b4b0300c2d3e4"
            held["fingerprint"] = {
                "gpu_uuids": [SECRETS[0]] * 8,
                "driver": "580.1",
                "numa_count": 2,
                "kernel": "6.8",
            }
            text = json.dumps(held)
        path.write_text(text)
    (place / "manifest.json").unlink()
    recorded = (VERIFIED / "h200x4-vm-no-p2p-usual.json").read_bytes()
    verified = msgspec.json.decode(recorded, type=Verification)
    msgspec.structs.replace(verified, hosts=("gpu-07",), notices=(words,)).keep(place)
    proof = Proof(verdict="sound", what=words, conditions={"kernel": "root=UUID"})
    ProvenLinks(proof=proof).keep(place)
    plan = place / "plan.json"
    before = plan.read_bytes()
    made = write_bundle(place, tmp_path / "box.zip")
    texts = names_and_texts(tmp_path / "box.zip")
    assert (
        set(made)
        == set(texts)
        == {"topology-0.json", "plan.json", "links.json", "verify.json", "versions.json"}
    )
    leaks = [(name, one) for name, text in texts.items() for one in SECRETS if one in text]
    assert leaks == []
    assert json.loads(texts["versions.json"])["driver"] == "580.1"
    assert json.loads(texts["plan.json"])["paths"] == json.loads(before)["paths"]


def test_a_bundle_replaces_bundles_alone_and_says_what_is_in_it(directory, tmp_path):
    archive = tmp_path / "box.zip"
    for _ in range(2):
        result = tccl("report", directory, "--bundle", archive)
        assert result.exit_code == 0
        assert {name for name in names_and_texts(archive) if name in result.stdout} >= {"plan.json"}
    other = tmp_path / "thesis.zip"
    other.write_text("mine")
    assert "is no archive" in refused(directory, directory, "--bundle", other)
    assert other.read_text() == "mine"


def test_templates_come_with_the_package():
    templates = resources.files("tccl_py.report") / "templates"
    assert {one.name for one in templates.iterdir()} >= {"report.html", "report.css"}
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '"report/templates/*"' in project
