"""Hosts compared by their doctors' facts: the odd one is named, and equal ones are not."""

import json
import random

import msgspec
import pytest

from tccl_py.health.comparison import compare_hosts, comparison_lines, facts_of
from tccl_py.health.host import rules
from tccl_py.model.links import DoctorReport
from tests.commands import tccl
from tests.test_nics import host_of

FACTS = {
    "driver": "570.86",
    "NCCL": "2.28.9",
    "variable NCCL_ALGO": "Ring (/etc/nccl.conf)",
    "library libibverbs.so.1": "libibverbs.so.1.14.50",
    "GPUs": "8",
    **{f"link of GPU {i}": "32 GT/s x16" for i in range(8)},
    **{f"NVLinks of GPU {i}": "18" for i in range(8)},
    "NICs": " ".join(f"mlx5_{i}" for i in range(8)),
    **{f"rate of mlx5_{i}": "400 Gbit/s" for i in range(8)},
    **{f"addresses of mlx5_{i}": "0 RoCE v1 link-local, 3 RoCE v2" for i in range(8)},
    "limit locked memory": "unlimited",
    "GPU Direct RDMA": "offered",
}


def reports(*hosts):
    return [DoctorReport(host=f"node{i:04}", facts=facts) for i, facts in enumerate(hosts)]


def changed(facts, name):
    """The facts with another value of this one, or without it."""
    return {**facts, name: "other"}


@pytest.mark.parametrize("seed", range(100))
def test_the_odd_host_of_a_random_cluster_is_named_with_the_odd_value(seed):
    rng = random.Random(seed)
    count, name = rng.randrange(3, 40), rng.choice(sorted(FACTS))
    odd = rng.randrange(count)
    hosts = [changed(FACTS, name) if at == odd else FACTS for at in range(count)]
    found = compare_hosts(reports(*hosts))
    (one,) = found.differences
    assert (one.hosts, one.what, one.value) == ((f"node{odd:04}",), name, "other")
    assert (one.usual, one.of) == (FACTS[name], count - 1)
    assert [len(group) for group in found.groups] == [count - 1, 1]
    assert f"node{odd:04}" in next(comparison_lines(found))[0]


@pytest.mark.parametrize("count", [2, 100])
def test_equal_hosts_have_no_difference(count):
    found = compare_hosts(reports(*[FACTS] * count))
    assert (found.differences, found.healthy, len(found.groups)) == ((), True, 1)


def test_of_two_hosts_neither_value_is_the_usual_one():
    found = compare_hosts(reports(FACTS, changed(FACTS, "driver")))
    assert {(one.hosts, one.usual) for one in found.differences} == {
        (("node0000",), ""),
        (("node0001",), ""),
    }


def test_what_a_doctor_could_not_see_is_no_difference():
    lacking = {name: text for name, text in FACTS.items() if name != "GPU Direct RDMA"}
    assert compare_hosts(reports(FACTS, FACTS, lacking)).differences == ()
    without = {name: text for name, text in FACTS.items() if "NCCL_ALGO" not in name}
    (one,) = compare_hosts(reports(FACTS, FACTS, without)).differences
    assert (one.value, one.severity) == ("none", "hang")


def test_what_hangs_comes_first_and_each_difference_has_its_source():
    odd = {**FACTS, "driver": "550.1", "rate of mlx5_3": "100 Gbit/s", "NCCL": "2.27.3"}
    found = compare_hosts(reports(FACTS, FACTS, FACTS, odd))
    assert [one.severity for one in found.differences] == ["hang", "slow", "note"]
    assert not found.healthy
    assert all(
        one.source in {rule.source for rule in rules().values()} for one in found.differences
    )


def test_variables_for_what_a_host_has_may_be_unlike():
    one, other = ({**FACTS, "variable NCCL_IB_HCA": name} for name in ("mlx5_0", "mlx5_1"))
    assert compare_hosts(reports(one, one, other)).healthy


def test_facts_are_of_what_equal_hosts_share(tmp_path):
    facts = [facts_of(host_of(tmp_path / name, (2, changes))) for name, changes in CHANGES.items()]
    named = {name for name in facts[0] if facts[0].get(name) != facts[1].get(name)}
    assert named == set()
    assert {name for name in facts[0] if facts[0].get(name) != facts[2].get(name)} == {
        "rate of mlx5_2"
    }
    kinds = "addresses of mlx5_2"
    assert (facts[0][kinds], facts[3][kinds]) == ("0 RoCE v2 link-local, 1 RoCE v2", "0 RoCE v2")


CHANGES = {
    "a": {},
    "b": {"gids": ("fe80::77", "::ffff:10.0.0.9")},
    "c": {"rate": 100},
    "d": {"gids": ("::ffff:10.0.0.7",)},
}


# The command


def compare(*paths, more=()):
    return tccl("doctor", "--compare", *more, *map(str, paths))


@pytest.fixture
def files(tmp_path):
    """What the doctors of three hosts printed; the last has another NCCL."""
    paths = []
    for report in reports(FACTS, FACTS, changed(FACTS, "NCCL")):
        path = tmp_path / f"{report.host}.json"
        path.write_bytes(msgspec.json.encode({"findings": [], **msgspec.structs.asdict(report)}))
        paths.append(path)
    return paths


def test_the_command_ends_by_one_where_hosts_differ_in_what_hangs(files):
    result = compare(*files)
    assert result.exit_code == 1
    assert "node0002" in result.stdout
    result = compare(*files, more=["--json"])
    assert json.loads(result.stdout)["differences"][0]["hosts"] == ["node0002"]
    assert compare(*files[:2]).exit_code == 0


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"host": 3}', "\x00\xff", "{" * 10**5])
def test_files_without_facts_are_refused(files, tmp_path, content):
    (bad := tmp_path / "bad.json").write_text(content)
    result = compare(*files, bad)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "bad.json" in result.stderr


def test_a_thousand_hosts_are_compared(tmp_path):
    hosts = [FACTS] * 999 + [changed(FACTS, "link of GPU 3")]
    (one,) = compare_hosts(reports(*hosts)).differences
    assert one.hosts == ("node0999",)
