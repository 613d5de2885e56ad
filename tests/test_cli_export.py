"""`tccl export --runtime tccl`: the file, its notices, and what answers its sets."""

import itertools
import json
import re
import shutil

import msgspec
import pytest
from typer.testing import CliRunner

from tccl_py.cli.main import app
from tccl_py.errors import InputError
from tccl_py.model.measurement import JournalHeader
from tccl_py.model.transfer import parse_flow, parse_set
from tccl_py.plan.load import load_plan
from tccl_py.plan.tables import kept_files
from tccl_py.plan.writing import write_plan
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.sources.journal import JournalFile
from tccl_py.sources.remembering import RememberingSource
from tccl_py.tccl_fork.database import mask_of
from tests.planned import SMALL, as_only, plan_of, rebind
from tests.sessions import Fake, measures_by
from tests.tccl_runtime import found_ring, parse_tccl_xml, read_tccl_xml

MEASURED = JournalHeader(machine=SMALL, identity="GPUs a, b", simulated=False)
SETS = ("G0->G0->G1", "G0->G1->G1")


def tccl(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def exported(directory, *arguments):
    result = tccl("export", directory, "--runtime", "tccl", *arguments)
    assert result.exit_code == 0, result.stderr
    return result


def refused(directory, *arguments):
    result = tccl("export", directory, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("tccl: ").rstrip("\n")


@pytest.fixture
def directory(tmp_path):
    """A simulated plan with its model."""
    place = tmp_path / "plan"
    place.mkdir()
    write_plan(plan_of(SMALL), place, models=as_only(load_bundled(SMALL)))
    return place


class Measured:
    """The model's answers, which say that hardware gave them."""

    simulated = False

    def __init__(self):
        self.source = Simulator(load_bundled(SMALL))

    def measure(self, sets):
        answers = self.source.measure(sets)
        return [msgspec.structs.replace(one, simulated=False) for one in answers]


@pytest.fixture
def measured(directory):
    """A measured plan of the same machine with a short journal."""
    plan = msgspec.structs.replace(plan_of(SMALL), simulated=False, assumed=False)
    write_plan(plan, directory)
    with RememberingSource(
        Measured(), journal=JournalFile(directory / "measurements.jsonl", MEASURED)
    ) as journal:
        journal.measure([parse_set(text) for text in SETS])
    return directory


# Simulated plans


def test_the_file_has_a_ring_for_every_set_of_gpus_and_the_notices_in_a_comment(
    directory, tmp_path
):
    result = exported(directory, "-o", tmp_path / "db.xml")
    assert result.stdout == ""
    *notices, last = result.stderr.splitlines()
    database = read_tccl_xml(tmp_path / "db.xml")
    assert "wrote 11 rings and 15 chains" in last
    assert len(database.intra) == 11
    assert notices[0].startswith("tccl: rates simulated, ")
    assert "NCCL_MIN_NCHANNELS=15" in notices[0]
    comments = [
        line.strip() for line in (tmp_path / "db.xml").read_text().splitlines() if "<!--" in line
    ]
    assert comments == [f"<!-- {line.removeprefix('tccl: ')} -->" for line in notices]
    assert found_ring(database, [15]).nodes[0].gpus == load_plan(directory).rings[0].gpus


def test_without_a_place_the_file_is_printed(directory):
    result = exported(directory / "plan.json", "--subsets", "0,1 1-3")
    database = parse_tccl_xml(result.stdout, where="stdout")
    assert [one.mask for one in database.intra] == [3, 14, 15]
    assert "8 of the 11 sets of" in result.stderr


def test_the_plan_and_its_journal_stay_as_they_are(directory, tmp_path):
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    exported(directory, "-o", tmp_path / "db.xml", "--max-sets", 20)
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--runtime", "tccl", "--hosts", "a"],
            "--hosts: is for another runtime, nccl",
        ),
        (
            ["--nic", "0"],
            "--nic: is for another runtime, tccl",
        ),
        (["--runtime", "tccl", "--max-sets", "0"], "--max-sets: is 0; 1 to 1000000"),
        (["--runtime", "tccl", "--nic", "3"], "NIC 3: is not in machine"),
        (
            ["--runtime", "tccl", "--subsets", "0,7"],
            "GPU 7: is not in the plan",
        ),
        (
            ["--runtime", "tccl", "--subsets", " "],
            "--subsets: names no set of GPUs",
        ),
        (
            ["--runtime", "tccl", "--subsets", "0,x"],
            "--subsets '0,x'",
        ),
        (["--runtime", "tccl", "-o", ""], "--output: is empty; name a DIR|FILE"),
    ],
)
def test_what_cannot_be_exported_is_refused(arguments, said, directory):
    assert refused(directory, *arguments).startswith(said)


def test_a_file_that_exists_stays(directory, tmp_path):
    there = tmp_path / "db.xml"
    there.write_text("mine")
    said = refused(directory, "--runtime", "tccl", "-o", there)
    assert " already exists; name a" in said and f"{there}" in said
    assert there.read_text() == "mine"
    said = refused(directory, "--runtime", "tccl", "-o", tmp_path)
    assert " already exists; name a" in said and f"{tmp_path}" in said


def test_a_plan_without_its_model_cannot_be_searched_again(directory):
    write_plan(plan_of(SMALL), directory)
    said = refused(directory, "--runtime", "tccl")
    assert "with `tccl plan --simulate`" in said


def test_a_place_that_cannot_be_written_is_refused(directory, tmp_path):
    said = refused(directory, "--runtime", "tccl", "-o", tmp_path / "no" / "db.xml")
    assert said.startswith(f"{tmp_path / 'no' / 'db.xml'}: cannot be written")


# Measured plans


def test_a_measured_plan_is_refused_on_another_machine(measured, monkeypatch):
    def none():
        raise InputError("this machine", "no NVIDIA driver answers (why)", "read a file")

    monkeypatch.setattr("tccl_py.readers.live.discover_machine", none)
    said = refused(measured, "--runtime", "tccl")
    assert "h200x4-vm: was" in said
    assert said.endswith("export it there")


def on_the_machine(monkeypatch):
    """Let this machine be the one that the plan was measured on."""
    session = Fake(SMALL, "G0 was warm")
    session.more = {}
    measures_by(monkeypatch, session, "tccl_py.plan.again")


def test_on_its_own_machine_missing_sets_are_measured_and_kept(measured, monkeypatch, tmp_path):
    on_the_machine(monkeypatch)
    before = (measured / "measurements.jsonl").read_text()
    result = exported(measured, "-o", tmp_path / "db.xml")
    assert "tccl: rates measured, " in result.stderr
    assert "G0 was warm" in result.stderr
    assert len(read_tccl_xml(tmp_path / "db.xml").intra) == 11
    after = (measured / "measurements.jsonl").read_text()
    assert after.startswith(before) and after.count("\n") > before.count("\n") + 10
    again = exported(measured, "-o", tmp_path / "again.xml").stderr
    assert "rates measured, 0 sets measured" in again


def test_a_measured_plan_without_its_journal_is_refused(measured):
    (measured / "measurements.jsonl").unlink()
    said = refused(measured, "--runtime", "tccl")
    assert "does not exist" in said


# Plans of clusters


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The simulated plan of three equal nodes."""
    place = tmp_path_factory.mktemp("cluster") / "plan"
    result = tccl("plan", "-o", place, "--simulate", SMALL, "--nodes", 3, "--max-sets", 50)
    assert result.exit_code == 0, result.stderr
    return place


def test_a_plan_of_equal_nodes_is_exported_with_the_ring_over_them(cluster, tmp_path):
    result = exported(cluster, "-o", tmp_path / "db.xml")
    database = read_tccl_xml(tmp_path / "db.xml")
    rate = found_ring(database, [15, 15, 15]).gbps
    planned = load_plan(cluster)
    assert result.exit_code == 0
    assert rate == pytest.approx(planned.rate_gbps, rel=0.02)


def test_a_plan_of_equal_nodes_whose_jobs_are_left_out_says_so(cluster, monkeypatch):
    monkeypatch.setattr("tccl_py.tccl_fork.database.MOST_MEMORY", 0)
    result = exported(cluster)
    assert "a job of several nodes" in result.stderr


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (None, "is missing; restore"),
        ("{}", "describes no machine"),
    ],
)
def test_a_cluster_without_its_model_cannot_be_searched_again(damage, said, cluster, tmp_path):
    place = tmp_path / "plan"
    shutil.copytree(cluster, place)
    (model,) = (place / "machines").glob("*.json")
    if damage is None:
        model.unlink()
    else:
        model.write_text(damage)
        rebind(place)
    assert said in refused(place, "--runtime", "tccl")


@pytest.fixture
def measured_cluster(cluster, tmp_path):
    """The cluster's plan as if it had been measured_cluster, with its tables."""
    plan = msgspec.structs.replace(load_plan(cluster), simulated=False, assumed=False)
    (tmp_path / "measured").mkdir()
    write_plan(plan, tmp_path / "measured", tables=kept_files(cluster))
    return tmp_path / "measured"


def chains_of_tables(place):
    """Every chain that enters and leaves by one NIC: its GPUs, blocks, and slowest hop's rate."""
    for file in (place / "tables").glob("*.json"):
        table = json.loads(file.read_text())
        for answer in table["answers"]:
            under = table["settings"][answer["under"]]
            chains = zip(answer["pairs"], answer["chains"], answer["gbps"], strict=True)
            for pair, hops, rates in chains:
                first = parse_flow(table["hops"][hops[0]]["flow"])
                if pair[0] == pair[1]:
                    buffer = under.get("buffsize", 4 << 20)
                    yield tuple(table["gpus"]), (first.blocks, buffer), min(rates)


def test_a_measured_clusters_chains_are_the_fastest_of_its_tables_by_equal_means(
    measured_cluster, tmp_path
):
    result = exported(measured_cluster, "-o", tmp_path / "db.xml")
    database = read_tccl_xml(tmp_path / "db.xml")
    assert result.exit_code == 0 and database.intra == ()
    blocks, size = map(int, re.findall(r"(?:MIN_NCHANNELS|BUFFSIZE)=([0-9]+)", result.stderr))
    best = {}
    for gpus, by, rate in chains_of_tables(measured_cluster):
        if by == (blocks, size) and len(gpus) > 1:
            best[mask_of(gpus)] = max(rate, best.get(mask_of(gpus), 0.0))
    written = {part.mask: {chain.gbps for chain in part.chains} for part in database.inter}
    for mask, rate in best.items():
        assert list(written[mask]) == [pytest.approx(rate, rel=1e-5)]
    assert {0b1111, 0b11} <= set(best)
    # Jobs over unlike sets of GPUs: the slower chain decides.
    for masks in itertools.product(best, repeat=3):
        assert found_ring(database, masks).gbps == pytest.approx(min(map(best.get, masks)))
    assert "a job of one node fails" in result.stderr and "0 sets measured" in result.stderr


def test_sets_of_gpus_and_nics_without_a_table_are_refused_or_named(measured_cluster):
    result = exported(measured_cluster, "--subsets", "0-3")
    assert {part.mask for part in parse_tccl_xml(result.stdout).inter} == {0b1111}
    some = exported(measured_cluster, "--subsets", "0-3 0,3")
    assert "no chain over GPUs 0, 3, and a job fails there" in some.stderr
    assert "no chain" in refused(measured_cluster, "--runtime", "tccl", "--subsets", "0,3")
    assert "no chain" in refused(measured_cluster, "--runtime", "tccl", "--nic", "9")


def test_a_measured_cluster_without_tables_is_refused(cluster, tmp_path):
    place = tmp_path / "plan"
    place.mkdir()
    write_plan(msgspec.structs.replace(load_plan(cluster), simulated=False, assumed=False), place)
    said = refused(place, "--runtime", "tccl")
    assert "has no tables" in said and f"{place}" in said
