"""The machine model: JSON, checks, knowledge, cuts, and files that hold them."""

import errno
import json
import os

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.files import encode_json, read_text, write_atomically
from tccl_py.model.machine import HiddenLink, Knowledge, NvLink, PeerAccess, check, check_knowledge
from tccl_py.model.symmetry import natural_cuts
from tests.toy import machine_from_json, toy_machine


@given(st.integers(1, 16), st.integers(1, 4), st.integers(0, 4))
def test_a_machine_read_from_its_json_is_the_same_machine(gpus, numa, per_switch):
    machine = toy_machine(gpus=gpus, numa_nodes=min(numa, gpus), per_switch=per_switch)
    assert machine_from_json(encode_json(machine), where="m.json") == machine


MISSING_GPU = PeerAccess(source=0, target=9, supported=True, provenance="assumed")


def changed(**changes):
    """The JSON of a small machine with some keys replaced; a callable changes what is there."""
    plain = json.loads(encode_json(toy_machine(gpus=2, per_switch=2)))
    for key, value in changes.items():
        plain[key] = value(plain[key]) if callable(value) else value
    return json.dumps(plain)


def first(**changes):
    return lambda devices: [{**devices[0], **changes}, *devices[1:]]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (changed(format_version=2), "has format version 2"),
        (changed(gpus=[]), "has no GPU"),
        (changed(numa_nodes=[]), "has no NUMA node"),
        (changed(gpus=lambda g: [g[0], g[0]]), "names device G0 twice"),
        (changed(gpus=first(index=-1)), "has a negative device index"),
        (changed(gpus=first(index=100_000)), "has device index 100000; at most 99999"),
        (changed(gpus=first(sm=-5)), ">= 0 - at `$.gpus[0].sm`"),
        (changed(gpus=first(parent="C7")), "G0 hangs from unknown C7"),
        (changed(bridges=first(parent="0000:80:00.0")), "the PCI tree turns"),
        (
            changed(gpus=first(link={"speed_gts": -4.0})),
            "$.gpus[0].link.speed_gts",
        ),
        (changed(gpus=first(link={"width": 0})), ">= 1 - at `$.gpus[0].link.width`"),
        (changed(gpus=lambda g: g * 400), "has 800 GPUs; at most 64 fit"),
        (changed(colour="red"), "Object contains unknown field `colour`"),
        (changed(name=7), "Expected `str`, got `int` - at `$.name`"),
        (changed(nvlinks=[{"source": "G0", "target": "G9", "count": 1}]), "joins G0 and G9"),
        (changed(nvlinks=[{"source": "G0", "target": "G0", "count": 1}]), "joins G0 and G0"),
        ('{"name": NaN}', "m.json: does not fit the machine format"),
        ('{"x": ' + "[" * 100_000, "m.json: "),
        ("", "m.json: is empty"),
    ],
)
def test_json_that_is_no_machine_is_refused_with_place_and_reason(text, sentence):
    with pytest.raises(InputError) as refusal:
        machine_from_json(text, where="m.json")
    assert sentence in str(refusal.value)


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.binary(max_size=3))
def test_damaged_json_is_a_machine_or_refused(place, junk):
    text = encode_json(toy_machine(gpus=3, numa_nodes=2))
    place %= len(text)
    damaged = text[:place] + junk.decode("latin-1") + text[place + len(junk) :]
    try:
        machine = machine_from_json(damaged, where="m.json")
    except InputError:
        return
    assert check(machine, where="m.json") == machine


def test_a_gpu_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(InputError, match=r"^GPU 5: .* 0, 1$"):
        toy_machine(gpus=2).gpu(5)


def test_without_peer_access_only_nvlinked_gpus_reach_each_other():
    links = (NvLink(source="G0", target="G1", count=4), NvLink(source="G1", target="G0", count=4))
    machine = msgspec.structs.replace(toy_machine(gpus=3), nvlinks=links)
    knowledge = Knowledge(peer_access_default=False)
    assert knowledge.can_access(machine, 0, 1)
    assert not knowledge.can_access(machine, 0, 2)


def test_a_stated_fact_beats_the_default():
    fact = PeerAccess(source=0, target=1, supported=False, provenance="reported")
    knowledge = Knowledge(peer_access=(fact,))
    assert not knowledge.can_access(toy_machine(gpus=2), 0, 1)
    assert knowledge.can_access(toy_machine(gpus=2), 1, 0)


@pytest.mark.parametrize(
    "knowledge",
    [
        Knowledge(peer_access=(MISSING_GPU,)),
        Knowledge(hidden_links=(HiddenLink(one="C0", other="ff:00.0", provenance="assumed"),)),
    ],
)
def test_knowledge_of_other_devices_is_refused(knowledge):
    with pytest.raises(InputError, match=r"k\.json"):
        check_knowledge(knowledge, toy_machine(gpus=2), where="k.json")


def test_cuts_are_what_shares_a_way_out():
    machine = toy_machine(gpus=8, numa_nodes=2, per_switch=2)
    cuts = natural_cuts(machine, Knowledge(), gpus=machine.gpu_indices)
    assert sorted(map(sorted, cuts)) == [
        [0, 1], [0, 1, 2, 3], [2, 3], [4, 5], [4, 5, 6, 7], [6, 7],
    ]  # fmt: skip


def test_switches_on_one_chip_are_cut_off_together():
    machine = toy_machine(gpus=8, per_switch=2)
    one, other = (bridge.id for bridge in machine.bridges[:2])
    chip = Knowledge(hidden_links=(HiddenLink(one=one, other=other, provenance="assumed"),))
    assert frozenset({0, 1, 2, 3}) in natural_cuts(machine, chip, gpus=machine.gpu_indices)


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "plan.json"
    target.write_text("old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"plan\.json: cannot be written \(No space left"):
        write_atomically(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert target.read_text() == "old"


def test_json_holds_no_control_character_and_reads_back_the_same():
    every = "".join(map(chr, range(0x100)))
    text = encode_json({"name": every})
    assert all(one == "\n" or (ord(one) >= 32 and not 127 <= ord(one) < 160) for one in text)
    assert json.loads(text) == {"name": every}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.write_bytes(b"ab\xff"), "byte 2: is not UTF-8"),
        (lambda path: path.write_bytes(b"x" * 101), "is larger than 100 bytes"),
        (lambda path: None, "cannot be read"),
    ],
)
def test_an_unreadable_file_is_refused_with_a_sentence(tmp_path, make, sentence):
    make(tmp_path / "in")
    with pytest.raises(InputError) as refusal:
        read_text(tmp_path / "in", limit=100)
    assert sentence in str(refusal.value)


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a regular file"):
        read_text(tmp_path / "pipe")
