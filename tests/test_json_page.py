"""The page of JSON keys and its schemas: up to date, and true of what commands print."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from tccl_py.experiments.record import Verification
from tccl_py.files import encode_json, parse_value
from tccl_py.report.verification import report_verification
from tests.commands import tccl
from tests.nccl_cases import CASES

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.json_page import COMMANDS, pages  # noqa: E402

RECORDED = sorted((CASES / "verification").glob("*.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans")
    few = ("--max-sets", "60", "--json", "-q")
    machine = printed("plan", path / "box", "--simulate", "amd-3090", *few)
    hosts = ("--simulate", "amd-v100", "--nodes", "2", "--rings", "1")
    cluster = printed("plan", path / "cluster", *hosts, *few)
    return path, machine, cluster


def printed(*words):
    result = tccl(*words)
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def same_keys(name, found):
    """Whether a type has all keys of an output, and no other: it is the same read and written."""
    result = msgspec.convert(found, COMMANDS[name], dec_hook=parse_value)
    return json.loads(encode_json(result)) == found


def test_the_page_and_the_schemas_are_those_of_the_types():
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, path


def test_plans_have_the_keys_of_the_page(folder):
    path, machine, cluster = folder
    assert same_keys("plan", machine)
    assert same_keys("plan", cluster)
    assert same_keys("plan", printed("show", path / "box", "--json"))


@pytest.mark.parametrize(
    "name, words",
    [
        ("env", ("env", "box", "--gpus", "0-3", "--json")),
        ("env", ("env", "box", "--nccl", "2.18", "--json")),
        ("env", ("env", "cluster", "--host", "node2", "--json")),
        ("env", ("env", "cluster", "--host", "other", "--json")),
        ("check", ("check", "box", "--json")),
        ("validate", ("validate", "box/nccl/graph.xml", "--machine", "amd-3090", "--json")),
        ("advise", ("advise", "amd-v100", "--workload", "pipeline", "--json")),
        ("discover", ("discover", "--json")),
        ("measure", ("measure", "0:1", "--simulate", "amd-v100", "--json")),
        ("workload", ("workload", "pipeline", "--ranks", "3", "--json")),
        ("pairs", ("measure", "--simulate", "amd-v100", "--json")),
        ("diff", ("show", "box", "box", "--json")),
    ],
)
def test_commands_print_the_keys_of_the_page(folder, monkeypatch, name, words):
    monkeypatch.chdir(folder[0])
    found = printed(*words, "-q")
    assert same_keys(name, found)
    for part in (found, *(found if isinstance(found, list) else ())):
        assert "environment" not in part or isinstance(part["environment"], dict)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_verifications_have_the_keys_of_the_page(path):
    result = msgspec.json.decode(path.read_text(), type=Verification)
    assert same_keys("verify", json.loads(encode_json(report_verification(result))))
