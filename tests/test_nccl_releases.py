"""Rules by release, against released libraries of NCCL: their recorded answers, and constants."""

import pytest

from tccl_py.model.machine import NumaNode, PciLink
from tccl_py.nccl.variables import given_variables, list_unfollowed
from tccl_py.nccl.versions import (
    between_cpus_gbps,
    nvlink_gbps,
    pci_gbps,
    say_unchecked,
    speeds,
    version_facts,
    why_no_plugin,
)
from tests.random_machines import pcie_machine
from tests.released_nccl import RELEASES, expected, fused, recorded

TRIED = 30
"""Machines of each release and kind that are compared; `scripts/judge-rules recorded`: all."""


def cpu(family, model=1, vendor="AuthenticAMD"):
    return NumaNode(
        index=0, numa_id=0, arch="x86_64", vendor=vendor, family=family, model=model, affinity=""
    )


@pytest.mark.parametrize(("family", "gbps"), [(23, 16.0), (25, 24.0), (26, 32.0), (None, 16.0)])
def test_amd_sockets_have_bandwidths_of_their_own_from_2_31_on(family, gbps):
    for version in ("2.31.2", "2.32.3"):
        assert between_cpus_gbps(cpu(family), version_facts(version)) == gbps
    assert between_cpus_gbps(cpu(family), version_facts("2.30.7")) == 16.0


@pytest.mark.parametrize(
    ("model", "before", "since"), [(0xAC, 22.0, 22.0), (0xAD, 22.0, 40.0), (0xAF, 22.0, 40.0),
                                   (0xB0, 22.0, 22.0), (0xCF, 40.0, 40.0)],
)  # fmt: skip
def test_granite_rapids_and_sierra_forest_are_fast_from_2_31_on(model, before, since):
    xeon = cpu(6, model, "GenuineIntel")
    assert between_cpus_gbps(xeon, version_facts("2.30.7")) == before
    assert between_cpus_gbps(xeon, version_facts("2.31.2")) == since


def test_tables_follow_the_release():
    rates = {v: speeds(100, inter=True, facts=version_facts(v)) for v in RELEASES}
    assert [90.2 in rates[v] for v in RELEASES] == [False, False, True, True]
    rubin, before = version_facts("2.32.3"), version_facts("2.31.2")
    assert [speeds(sm, inter=False, facts=rubin)[0] for sm in (103, 107, 110, 120)] == [
        90.0, 280.8, 90.0, 90.0]  # fmt: skip
    assert speeds(107, inter=False, facts=before)[0] == 90.0
    assert [nvlink_gbps(107, facts) for facts in (before, rubin)] == [40.1, 31.2]
    unknown = [pci_gbps(PciLink(), unknown_gts=facts.unknown_gts) for facts in
               (version_facts("2.30.7"), before)]  # fmt: skip
    assert unknown == [12.0, 24.0]


@pytest.mark.parametrize(
    ("first", "before", "fact", "values"),
    [
        ("2.21.5", "2.21.4", "max_children", (32, 128)),
        ("2.24.0", "2.23.99", "crossed", (1, 2)),
        ("2.25.1", "2.25.0", "max_channels", (16, 32)),
        ("2.27.3", "2.27.2", "checks_values", (False, True)),
        ("2.28.3", "2.28.2", "has_cost_model", (False, True)),
        ("2.29.2", "2.29.1", "channel_bytes", (16384, 32768)),
        ("2.29.7", "2.29.6", "blackwell_ring_ll128_gbps", (34.5, 40.0)),
        ("2.30.0", "2.29.99", "rank_overrides_dev", (False, True)),
        ("2.30.3", "2.30.2", "device_nodes", (False, True)),
        ("2.30.7", "2.30.6", "nearer_wins", (False, True)),
        ("2.31.0", "2.30.99", "tuners_lower_channels", (False, True)),
        ("2.32.0", "2.31.99", "has_rubin", (False, True)),
    ],
)
def test_each_change_is_there_from_its_first_release_on(first, before, fact, values):
    assert tuple(getattr(version_facts(one), fact) for one in (before, first)) == values


@pytest.mark.parametrize("tried", ["", "2.33.1"])
def test_the_plugin_is_for_releases_from_the_first_with_plugins_to_the_last_that_was_tried(tried):
    works = ["2.28.7", "2.28.9", "2.29.2", "2.30.7", "2.31.0", "2.32", "2.32.3", "2.32.99"]
    assert [version for version in works if why_no_plugin(version, newest=tried)] == []
    for old in ("2.18.5", "2.27.7", "2.28.3", "2.28.6", "1.9.9"):
        assert "came with 2.28.7" in why_no_plugin(old, newest=tried)
    for new in ("2.33.0", "2.33.1", "2.33.2", "2.34.0", "3.0.0"):
        good = tried and new in ("2.33.0", "2.33.1")
        assert (why_no_plugin(new, newest=tried) == "") == bool(good)


def test_a_newer_release_has_one_line_on_what_was_not_checked():
    assert say_unchecked("2.32.6") == say_unchecked("2.31") == ""
    assert "2.34.1 is newer than 2.32" in say_unchecked("2.34.1")
    assert "\n" not in say_unchecked("2.34.1")


def test_ranks_see_the_cpus_of_earlier_ranks_and_of_nics_first():
    text = pcie_machine(29)
    numbers = [text.index(f'numaid="{node}"') for node in (1, 0, 2, 3)]
    assert numbers == sorted(numbers)
    whole = fused(text, (7, 0))
    assert whole.index('numaid="0"') < whole.index('numaid="2"') < whole.index('numaid="1"')


@pytest.mark.parametrize("seed", [391, 395, 970])
def test_a_gpus_cpu_is_the_one_of_fewest_links_before_2_30_7(seed):
    """NVLink bridges between sockets lead to the other CPU, over more links with more bandwidth."""
    assert expected(pcie_machine(seed), "2.28.9").difference(recorded()["2.28.9", seed]) == ""


@pytest.mark.parametrize("release", RELEASES)
def test_recorded_answers_of_released_libraries_are_as_expected(release):
    answers = {seed: answer for (name, seed), answer in recorded().items() if name == release}
    assert len(answers) >= 250
    whole = [seed for seed, answer in answers.items() if answer.channels]
    assert len(whole) >= 50
    differences = {}
    for seed in (*whole[:TRIED], *sorted(set(answers) - set(whole))[:TRIED]):
        found = expected(pcie_machine(seed), release, ordered_by=answers[seed].channels)
        differences[seed] = found.difference(answers[seed])
    assert set(differences.values()) == {""}, differences


def test_variables_of_the_newest_releases_are_names_of_nccl():
    names = ("NCCL_IB_SORT_MERGE_NICS", "NCCL_TOPO_SCATTER_START_NET", "NCCL_PROGRESS_COUNTERS")
    assert given_variables([f"{name}=1" for name in names]) == dict.fromkeys(names, "1")
    assert [text.split()[0] for text in list_unfollowed(dict.fromkeys(names, "1"))] == list(
        names[:2]
    )
