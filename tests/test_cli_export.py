"""`tccl export --runtime tccl`: the file, its notices, and what answers its sets."""

import itertools
import json
import re

import pytest

from tccl_py.model.transfer import parse_flow
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.plan.tables import kept_files
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.tccl_fork import mask_of
from tests.commands import refused, tccl
from tests.planned import SMALL, as_only, plan_of, replace_plan
from tests.tccl_runtime import found_ring, read_tccl_xml


def exported(directory, *arguments):
    result = tccl("export", directory, "--runtime", "tccl", *arguments)
    assert result.exit_code == 0, result.stderr
    return result


@pytest.fixture
def directory(tmp_path):
    """A simulated plan with its model."""
    place = tmp_path / "plan"
    place.mkdir()
    write_plan(plan_of(SMALL), place, models=as_only(load_bundled(SMALL)))
    return place


# Simulated plans


def test_the_file_has_a_ring_for_every_set_of_gpus_and_the_notices_in_a_comment(
    directory, tmp_path
):
    result = exported(directory, "-o", tmp_path / "db.xml")
    assert result.stdout == ""
    *notices, last = result.stderr.splitlines()
    database = read_tccl_xml(tmp_path / "db.xml")
    assert "wrote 11 rings" in last
    assert len(database.intra) == 11
    assert notices[0].startswith("tccl: rates simulated; ")
    assert "NCCL_MIN_NCHANNELS=15" in notices[0]
    comments = [
        line.strip() for line in (tmp_path / "db.xml").read_text().splitlines() if "<!--" in line
    ]
    assert comments == [f"<!-- {line.removeprefix('tccl: ')} -->" for line in notices]
    assert found_ring(database, [15]).nodes[0].gpus == load_plan(directory).rings[0].gpus


# Plans of clusters


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The simulated plan of three equal nodes."""
    place = tmp_path_factory.mktemp("cluster") / "plan"
    result = tccl("plan", place, "--simulate", SMALL, "--nodes", 3, "--max-sets", 50)
    assert result.exit_code == 0, result.stderr
    return place


def test_a_plan_of_equal_nodes_is_exported_with_the_ring_over_them(cluster, tmp_path):
    result = exported(cluster, "-o", tmp_path / "db.xml")
    database = read_tccl_xml(tmp_path / "db.xml")
    rate = found_ring(database, [15, 15, 15]).gbps
    assert result.exit_code == 0
    assert rate == pytest.approx(load_plan(cluster).rate_gbps, rel=0.02)


def test_the_text_is_as_the_forks_parser_wants_it(cluster):
    lines = exported(cluster).stdout.splitlines()
    there = {re.sub(r'(idx|bits|numa|gpus|gbps)="[0-9.]+"', r'\1=""', line) for line in lines}
    assert {line for line in there if "<!--" not in line and "<transfer " not in line} == {
        *("<root>", "</root>", "  <intra>", "  </intra>", "  <inter>", "  </inter>"),
        '  <metadata num_gpus="" num_numa="" num_bits_idx=""/>',
        *('    <subset gpus="">', "    </subset>", "      </transfers>"),
        '      <transfers gbps="" '
        'head_type="CPU_CPU_INTER" head_src_idx="" head_dst_idx="" '
        'tail_type="CPU_CPU_INTER" tail_src_idx="" tail_dst_idx="">',
    }
    assert '        <transfer type="GPU_WRITE_GPUMEM_KERNEL" src_idx="" dst_idx=""/>' in there


@pytest.fixture
def measured_cluster(cluster, tmp_path):
    """The cluster's plan as if it had been measured_cluster, with its tables."""
    plan = replace_plan(load_plan(cluster), simulated=False, assumed=False)
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
    assert "no ring inside a node over 11 of the 11 sets" in result.stderr


def test_a_measured_cluster_without_tables_is_refused(cluster, tmp_path):
    place = tmp_path / "plan"
    place.mkdir()
    write_plan(replace_plan(load_plan(cluster), simulated=False, assumed=False), place)
    refused(tccl("export", place, "--runtime", "tccl"), "has no tables of chains")
