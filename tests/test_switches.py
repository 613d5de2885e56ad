"""Descriptions of switches: SLURM's topology.conf, the YAML form, and what is no tree."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.merge.rings import ChainTable, merge_with_switches
from tccl_py.model.cluster import SwitchTree, compress
from tccl_py.model.reports import restrict
from tccl_py.readers.hosts import MAX_BYTES, expand
from tccl_py.readers.switches import (
    Interconnect,
    parse_slurm_topology,
    parse_switch_yaml,
    read_switches,
)
from tests.effort import calls_at_most

# After topology.conf(5): two levels, comments, a continued line, keys in any case.
SLURM = """\
##################################################################
# Slurm's network topology configuration file
##################################################################
SwitchName=s0 Nodes=dev[0-5] LinkSpeed=100
switchname=s1 NODES=dev[6-11]   # the second leaf
SwitchName=s2 \\
    Nodes="dev[12-17]"
SwitchName = s3 Switches = s[0-2]
"""

YAML = """\
# leaf and spine
switches:
  - name: leaf1
    uplink_gbps: 12.5
    hosts: [node1, node2]
  - name: leaf2
    hosts: "node[3-4]"
  - name: spine
    switches: [leaf1, leaf2]
rails: only
"""


def refused(call, *parts: str) -> None:
    """`call` is refused by a sentence that has the parts, with few calls."""
    with calls_at_most(10_000_000), pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert text.isprintable() and len(text) < 500, text
    for part in parts:
        assert part in text, text


def leaf(name: str, *hosts: str, uplink: float | None = None) -> SwitchTree:
    return SwitchTree(name=name, hosts=hosts, uplink_gbps=uplink)


# SLURM


def test_topology_conf():
    tree = parse_slurm_topology(SLURM, where="topology.conf")
    assert tree.name == "s3"
    assert [one.name for one in tree.switches] == ["s0", "s1", "s2"]
    assert tree.switches[2].hosts == expand("dev[12-17]")
    assert all(one.uplink_gbps is None for one in tree.all_switches)


def test_roots_are_joined_by_a_switch_without_name():
    text = "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\n"
    expected = SwitchTree(name="", switches=(leaf("a", "n1"), leaf("b", "n2")))
    assert parse_slurm_topology(text, where="t") == expected


def test_only_the_jobs_hosts_are_kept():
    tree = parse_slurm_topology(SLURM, where="t", hosts=["dev13", "dev1", "dev0"])
    assert tree == SwitchTree(name="s3", switches=(leaf("s0", "dev0", "dev1"), leaf("s2", "dev13")))
    job = ["dev1", "dev1.cluster", "dev2"]
    refused(lambda: parse_slurm_topology(SLURM, where="t", hosts=job), "t: host dev1.cluster")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["no switch"]),
        ("Nodes=a\n", ["t:1", "no SwitchName"]),
        ("SwitchName=s1 Nodes=a\nSwitchName=s1 Nodes=b\n", ["t:2", "'s1' is also at t:1"]),
        ("SwitchName=s1 Nodes=a Switches=s2\n", ["t:1", "both"]),
        ("SwitchName=s1 Nodes=a Nodes=b\n", ["t:1", "twice"]),
        ("SwitchName=s1 Switches=s2\n", ["t:1", "no switch 's2'"]),
        ("SwitchName=s1 Switches=s1\n", ["t:1", "below itself"]),
        ("SwitchName=s1 Switches=s2\nSwitchName=s2 Switches=s1\n", ["below itself"]),
        ("SwitchName=s1 Nodes=a\nSwitchName=x Switches=s1\nSwitchName=y Switches=s1\n", ["t:3"]),
        ("SwitchName=s1 Nodes=a\nSwitchName=x Switches=s1,s1\n", ["t:2", "also below"]),
        ("SwitchName=s1 Nodes=a\nSwitchName=s2 Nodes=a\n", ["host a", "'s1' and 's2'"]),
        ("SwitchName=s1 Nodes=a,a\n", ["host a"]),
        ("SwitchName=s1 Nodes=n[0-999999999]\n", ["t:1", "more than"]),
        ("SwitchName=s1 Nodes=n[1\n", ["t:1", "do not match"]),
        ("SwitchName=s1 Nodes=../../etc\n", ["t:1", "cannot be a name"]),
        ("SwitchName=../s1 Nodes=a\n", ["t:1", "cannot be a name"]),
        ("SwitchName=s1 Speed=4 Nodes=a\n", ["t:1", "'Speed'"]),
        ("BlockName=b1 Nodes=a\n", ["t:1", "topology/block"]),
        ("Include other.conf\n", ["t:1", "not understood"]),
        ("SwitchName=s1 Nodes=\n", ["t:1", "not understood"]),
        ('SwitchName=s1 Nodes="a\n', ["t:1"]),
        ("SwitchName=s1 Nodes=a \\\n  garbage\n", ["t:1", "garbage"]),
        ("SwitchName=s1 Nodes=\x1b[31m\n", ["t:1"]),
        ("SwitchName=s1 Nodes=a" + " " * 2_000_000 + "!\n", ["t:1"]),
        ("\\\n" * 500_000, ["no switch"]),
        ("SwitchName=s1 " + "=" * 1_000_000, ["t:1"]),
        ("a" * 1_000_000, ["t:1"]),
        ("".join(f"SwitchName=s{n} Nodes=n[1-65536]\n" for n in range(1000)), ["more than"]),
        ("".join(f"SwitchName=s{n} Switches=s{n + 1}\n" for n in range(1000)), ["no switch"]),
        (
            "".join(f"SwitchName=s{n} Switches=s{n + 1}\n" for n in range(1000))
            + "SwitchName=s1000 Nodes=a\n",
            ["levels"],
        ),
    ],
)
def test_topologies_that_are_refused(text, parts):
    refused(lambda: parse_slurm_topology(text, where="t"), *parts)


# YAML


def test_yaml():
    network = parse_switch_yaml(YAML, where="net.yaml")
    tree = SwitchTree(
        name="spine",
        switches=(leaf("leaf1", "node1", "node2", uplink=12.5), leaf("leaf2", "node3", "node4")),
    )
    assert network == Interconnect(switches=tree, rails="only")


def test_yaml_nests_by_name_and_inline():
    text = """
switches:
- name: root
  hosts: login
  switches:
  - leaf1
  - {name: leaf2, uplink_gbps: 1e1, hosts: [b]}
  - name: pod
    switches: [{name: leaf3, hosts: [c, "d[1-2]"]}]
- {name: leaf1, hosts: [a]}
"""
    network = parse_switch_yaml(text, where="net.yaml")
    pod = SwitchTree(name="pod", switches=(leaf("leaf3", "c", "d1", "d2"),))
    below = (leaf("leaf1", "a"), leaf("leaf2", "b", uplink=10.0), pod)
    assert network.switches == SwitchTree(name="root", hosts=("login",), switches=below)
    assert network.rails == "any"


def test_names_stay_what_is_written():
    text = "switches: [{name: 0x10, hosts: [010, no, null_, 1e3, 12:30:00, true]}]"
    refused(lambda: parse_switch_yaml(text, where="net.yaml"), "'12:30:00'")
    text = "switches: [{name: 0x10, hosts: [010, no, 1e3, true, 2026-01-01]}]"
    tree = parse_switch_yaml(text, where="net.yaml").switches
    assert tree == leaf("0x10", "010", "no", "1e3", "true", "2026-01-01")


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (BOMB, ["net.yaml:1", "anchor"]),
        ("switches: [{name: a, hosts: *x}]", ["net.yaml:1"]),
        ("switches: &s [*s]", ["net.yaml:1", "anchor"]),
        ("switches: !!python/object/apply:os.system [id]", ["net.yaml:1", "tag"]),
        ("switches: [{name: !!str a}]", ["tag"]),
        ("switches:\n- name: a\n---\nswitches: []\n", ["another document"]),
        ("[" * 1_000_000, ["net.yaml:1", "too deep"]),
        ("{a: " * 100_000, ["net.yaml:1", "too deep"]),
        ("- " * 100_000, ["net.yaml:1", "too deep"]),
        ("switches: [" + "x," * 2_000_000, ["too deep or too long"]),
        ("switches: [{name: a, name: b}]", ["'name' is there twice"]),
        ("switches: [{name: a}]\nswitches: []", ["net.yaml:2", "twice"]),
        ("? [a]\n: b\n", ["a name is needed"]),
        ("switches: {<<: {name: a}}", ["net.yaml switches", "`array`"]),
        ("switches: [a", ["net.yaml:", "is not YAML"]),
        ("\tswitches: []", ["is not YAML"]),
        ("switches: [{name: a}]\n]", ["is not YAML"]),
        ("switches: []\n\x00", ["characters"]),
        ("switches: [\x1b]", ["characters"]),
        ("", ["is empty"]),
        ("~", ["`object`"]),
        ("text", ["`object`"]),
        ("[]", ["is empty"]),
        ("rails: any", ["has no switch"]),
        ("switches: []", ["has no switch"]),
        ("switches: 5", ["net.yaml switches", "`array`"]),
        ("switches: [5]", ["switches[0]", "`object`"]),
        ("switches: [[]]", ["switches[0]", "`object`"]),
        ("switches: [{}]", ["switches[0]", "`name`"]),
        ("switches: [{name: [a]}]", ["switches[0].name", "`str`"]),
        ("switches: [{name: ''}]", ["switches[0].name", "length"]),
        ("switches: [{name: a, host: [b]}]", ["switches[0]", "`host`", "hosts: or"]),
        ("switches: [{name: a, hosts: {b: c}}]", ["switches[0].hosts"]),
        ("switches: [{name: a, hosts: [[b]]}]", ["switches[0].hosts[0]"]),
        ("switches: [{name: a, hosts: [n[1-2]]}]", ["quotes"]),
        ("switches: [{name: a, hosts: [/etc]}]", ["'/etc'"]),
        ("switches: [{name: a, switches: [b]}]", ["no switch 'b'"]),
        ("switches: [{name: a, switches: [a]}]", ["below itself"]),
        ("switches: [{name: a, switches: [{name: a}]}]", ["'a' is also at"]),
        ("switches: [{name: a, switches: [b]}, {name: b, switches: [a]}]", ["below itself"]),
        ("switches: [{name: a, hosts: [x]}, {name: b, hosts: [x]}]", ["host x"]),
        ("switches: [{name: a, uplink_gbps: 0}]", ["switches[0].uplink_gbps", "GB/s above 0"]),
        ("switches: [{name: a, uplink_gbps: -1}]", ["switches[0].uplink_gbps"]),
        ("switches: [{name: a, uplink_gbps: .nan}]", ["switches[0].uplink_gbps"]),
        ("switches: [{name: a, uplink_gbps: inf}]", ["switches[0].uplink_gbps"]),
        ("switches: [{name: a, uplink_gbps: 1e999}]", ["switches[0].uplink_gbps"]),
        ("switches: [{name: a, uplink_gbps: 12 GB}]", ["switches[0].uplink_gbps"]),
        ("switches: [{name: a, uplink_gbps: [1]}]", ["switches[0].uplink_gbps"]),
        ("switches: [{name: a}]\nrails: both", ["net.yaml rails", "both", "any or only"]),
        ("switches: [{name: a}]\nrails: [any]", ["net.yaml rails"]),
        ("switches: [{name: a}]\nrail: any", ["`rail`"]),
        ("switches: [{name: a, hosts: 'n[0-999999999]'}]", ["more than"]),
        (
            "switches:\n"
            + "".join(f"- {{name: a{i}, hosts: 'n[1-65536]'}}\n" for i in range(10_000)),
            ["more than"],
        ),
        ("switches: [{name: a, hosts: [" + "'n[1-65536]'," * 10_000 + "]}]", ["more than"]),
        ("- topology: t\n  tree: {}\n", ["another form"]),
        ("switches: [" + "{name: a, switches: [" * 40, ["too deep"]),
    ],
)
def test_yaml_that_is_refused(text, parts):
    refused(lambda: parse_switch_yaml(text, where="net.yaml"), "net.yaml", *parts)


# Files


@pytest.mark.parametrize("name", ["topology.conf", "net.txt", "net"])
def test_slurm_files_are_told_by_suffix_or_content(name, tmp_path: Path):
    path = tmp_path / name
    path.write_text(SLURM)
    assert read_switches(path).switches.name == "s3"
    assert [*read_switches(path, ["dev7"]).switches.all_hosts] == ["dev7"]


@pytest.mark.parametrize("name", ["net.yaml", "net.YML", "net.txt", "net"])
def test_yaml_files_are_told_by_suffix_or_content(name, tmp_path: Path):
    path = tmp_path / name
    path.write_text(YAML)
    assert read_switches(path).rails == "only"


def test_files_that_cannot_be_read(tmp_path: Path):
    large = tmp_path / "large.yaml"
    with large.open("wb") as handle:
        handle.truncate(MAX_BYTES + 1)
    refused(lambda: read_switches(large), "larger than")
    refused(lambda: read_switches(tmp_path / "none.conf"), "cannot be read")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    refused(lambda: read_switches(tmp_path / "bytes.yaml"), "UTF-8")


def test_ten_thousand_hosts_are_read_with_few_calls():
    lines = [
        f"- {{name: leaf{n}, hosts: [{', '.join(f'gpu{32 * n + i:05d}' for i in range(32))}]}}"
        for n in range(320)
    ]
    with calls_at_most(700_000):
        network = parse_switch_yaml("switches:\n" + "\n".join(lines), where="net.yaml")
        assert len([*network.switches.all_hosts]) == 10_240


# Trees


def test_the_merge_takes_the_tree_of_a_job():
    job = ["node4", "node1", "node3", "node2"]
    tree = parse_switch_yaml(YAML, where="net.yaml", hosts=job).switches
    table = ChainTable(name="box", rates=np.array([[20.0]]))
    ring = merge_with_switches([table], dict.fromkeys(job, 0), tree)
    assert ring.rate_gbps == 12.5
    assert sorted(ring.hosts) == sorted(job)
    places = [ring.hosts.index(host) for host in ("node1", "node2")]
    assert (places[0] - places[1]) % 4 in (1, 3)


@st.composite
def trees(draw) -> SwitchTree:
    """A tree of switches over at most 12 hosts, no switch without a host below it."""
    hosts = iter(draw(st.permutations([f"n{i:02d}" for i in range(12)])))
    number = iter(range(100))

    def switch(depth: int) -> SwitchTree:
        below = draw(st.integers(0, 2)) if depth < 3 else 0
        name = f"s{next(number)}"
        own = draw(st.integers(0 if below else 1, 3))
        return SwitchTree(
            name=name,
            hosts=tuple(host for _, host in zip(range(own), hosts, strict=False)),
            switches=tuple(switch(depth + 1) for _ in range(below)),
            uplink_gbps=draw(st.none() | st.floats(1e-3, 1e5)),
        )

    tree = switch(0)
    wanted = [*tree.all_hosts]
    return restrict(tree, wanted) if wanted else leaf("s", "n00")


def switch_yaml(network: Interconnect) -> str:
    """The YAML form of a network."""
    lines = ["switches:"]
    for switch in network.switches.all_switches:
        if not switch.name:  # the reader joins several roots again
            continue
        lines.append(f'  - name: "{switch.name}"')
        if switch.uplink_gbps is not None:
            lines.append(f"    uplink_gbps: {switch.uplink_gbps!r}")
        if switch.hosts:
            lines.append(f'    hosts: "{compress(switch.hosts)}"')
        if switch.switches:
            lines.append(f'    switches: "{compress(below.name for below in switch.switches)}"')
    return "\n".join([*lines, f"rails: {network.rails}", ""])


@given(trees(), st.sampled_from(["any", "only"]))
def test_the_yaml_form_is_read_back(tree, rails):
    network = Interconnect(switches=tree, rails=rails)
    assert parse_switch_yaml(switch_yaml(network), where="net.yaml") == network


@given(trees())
def test_several_roots_are_read_back(tree):
    second = leaf("another", "n99")
    network = Interconnect(switches=SwitchTree(name="", switches=(tree, second)))
    assert parse_switch_yaml(switch_yaml(network), where="net.yaml") == network


@given(trees(), st.data())
def test_a_restricted_tree_has_just_those_hosts_in_the_same_order(tree, data):
    everyone = [*tree.all_hosts]
    chosen = data.draw(st.sets(st.sampled_from(everyone), min_size=1))
    kept = restrict(tree, chosen)
    assert [*kept.all_hosts] == [host for host in everyone if host in chosen]
    before = {one.name: one for one in tree.all_switches}
    for switch in kept.all_switches:
        assert [*switch.all_hosts]
        assert switch.uplink_gbps == before[switch.name].uplink_gbps
        under = {one.name for one in before[switch.name].all_switches}
        assert {one.name for one in switch.all_switches} <= under
    assert restrict(kept, chosen) == kept


def test_restricting_refuses_by_name():
    tree = SwitchTree(name="", switches=(leaf("a", "n1", "n2"), leaf("b", "n2", "n3")))
    refused(lambda: restrict(tree, ["n1", "n9"]), "host n9 is at no switch")
    refused(lambda: restrict(tree, ["n1", "n1"]), "names host n1 twice")
    refused(lambda: restrict(tree, ["n2"]), "host n2 is at the switches 'a' and 'b'")
    refused(lambda: restrict(tree, ["../x"]), "'../x'")
    refused(lambda: restrict(tree, []), "there are none")
    assert restrict(tree, ["n1"]) == leaf("a", "n1")
    kept = restrict(tree, ["n3", "n1"])
    assert kept == msgspec.structs.replace(tree, switches=(leaf("a", "n1"), leaf("b", "n3")))


@given(st.text(alphabet="switchename:- []{}&*!\n\t'\"#,|>?%@`~0123", max_size=80))
def test_any_text_is_a_network_or_refused(text):
    for parse in (parse_switch_yaml, parse_slurm_topology):
        try:
            parse(text, where="net")
        except InputError as error:
            assert str(error).isprintable()


@pytest.mark.parametrize(
    ("text", "place"),
    [("", ""), ("cables:", " cables:"), ("ports:\ncables: [[a:0, b:0]]", " ports:")],
)
def test_an_empty_file_and_an_empty_field_are_called_empty(text, place):
    with pytest.raises(InputError, match=f"^net.yaml{place}: is empty; write .*cables:|ports:"):
        parse_switch_yaml(text, where="net.yaml")
