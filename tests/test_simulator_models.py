"""Bundled models, models from files, hostile input, and models for any machine."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from tccl_py.errors import InputError
from tccl_py.files import encode_json
from tccl_py.model.machine import Nic, NvLink, NvSwitch, PciLink
from tccl_py.model.transfer import parse_set
from tccl_py.simulator.descriptions import (
    bundled_names,
    load_bundled,
    load_machine,
    model_for,
    model_from_json,
)
from tccl_py.simulator.model import bundled_parameters
from tccl_py.simulator.source import Simulator
from tccl_py.sources.opening import open_source
from tests.toy import toy_machine

TEXT = encode_json(load_bundled("asus-esc8000a-e13p"))


def changed(path: list[str | int], value: object) -> str:
    data = json.loads(TEXT)
    at = data
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return json.dumps(data)


def test_the_bundled_machines_are_those_documented():
    assert bundled_names() == (
        "amd-3090",
        "amd-v100",
        "asus-esc8000a-e13p",
        "gb10-2port",
        "h200x4-vm",
        "intel-v100",
        "nvswitch-8gpu-8nic",
        "supermicro-h12dsg-8x3090",
        "wrx90-16gpu-4switch",
    )


@pytest.mark.parametrize("name", bundled_names())
def test_a_bundled_model_survives_a_round_trip_and_bears_its_name(name):
    model = load_bundled(name)
    assert model.name == model.machine.name == name
    assert model_from_json(encode_json(model), where="x") == model


def test_an_unknown_name_lists_the_right_ones():
    with pytest.raises(InputError) as refused:
        load_bundled("asus")
    assert refused.value.where == "machine 'asus'"
    assert ", ".join(bundled_names()) in refused.value.right


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".json", "/" + "x" * 300])
def test_a_name_too_long_for_a_file_is_refused_with_a_sentence(name):
    for opened in (load_machine, open_source):
        with pytest.raises(InputError, match=r"bundled|does not exist"):
            opened(name)


def test_a_folder_with_the_name_of_a_bundled_model_does_not_hide_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h200x4-vm").mkdir()
    assert open_source("h200x4-vm").header.machine == "h200x4-vm"
    with pytest.raises(InputError, match="measurements"):
        open_source(tmp_path / "h200x4-vm")


def test_a_name_is_no_path():
    with pytest.raises(InputError, match="is not bundled"):
        load_bundled("../parameters")


def test_a_model_is_read_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(TEXT)
    assert load_machine(str(path)) == load_bundled("asus-esc8000a-e13p")


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (["format_version"], 2, "has format version 2"),
        (["surprise"], 1, "unknown field `surprise`"),
        (["capacities", 0, "write"], {"value": -1, "provenance": "assumed"}, "comes to -1"),
        (["capacities", 0, "write"], {"value": 1e30, "provenance": "assumed"}, "comes to 1e\\+30"),
        (["capacities", 0, "write"], {"value": 0, "provenance": "assumed"}, "comes to 0"),
        (["capacities", 0, "write"], {"provenance": "assumed"}, "needs a value"),
        (
            ["capacities", 0, "write"],
            {"value": 1, "scale": -1, "provenance": "assumed"},
            "comes to -1",
        ),
        (
            ["capacities", 0, "write"],
            {"parameter": "warp", "provenance": "assumed"},
            "names the unknown parameter 'warp'",
        ),
        (
            ["capacities", 0, "at"],
            {"type": "links", "kinds": ["pci"], "devices": ["G9"]},
            "speaks of G9",
        ),
        (
            ["capacities", 0, "at"],
            {"type": "links", "kinds": ["pci"], "devices": ["C7"]},
            "speaks of C7",
        ),
        (["capacities"], json.loads(TEXT)["capacities"][:1] * 10_001, "length <= 10000"),
        (["congestion", 0, "members"], [], r"length >= 1 - at `\$.congestion\[0\].members`"),
        (["congestion", 0, "at_least"], {"source_gpu": 0}, r">= 1 - at `\$.congestion"),
        (["executors", 0, "sharpness"], 0.5, r">= 1.* - at `\$.executors\[0\].sharpness`"),
        (["executors", 0], {"name": "x", "executor": "kernel", "path": "direct"}, "bounds nothing"),
        (["machine", "gpus", 0, "parent"], "0000:99:00.0", "hangs from unknown"),
        (["knowledge", "hidden_links", 0, "one"], "S7", "a hidden link ends"),
    ],
)
def test_a_model_that_does_not_fit_together_is_refused_with_a_sentence(path, value, sentence):
    with pytest.raises(InputError, match=sentence):
        model_from_json(changed(path, value), where="mine.json")


@pytest.mark.parametrize("text", ["", "NaN", "[" * 100_000, '{"format_version": 1e999}', "{}"])
def test_text_that_is_no_model_is_refused(text):
    with pytest.raises(InputError, match=r"mine\.json"):
        model_from_json(text, where="mine.json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_figures_that_are_no_numbers_are_refused(number):
    text = changed(["capacities", 0, "write"], {"value": 12345.5, "provenance": "assumed"})
    with pytest.raises(InputError):
        model_from_json(text.replace("12345.5", number), where="mine.json")


def test_bundled_parameters_are_positive_and_named_once():
    parameters = bundled_parameters().parameters
    assert len({one.name for one in parameters}) == len(parameters)
    for one in parameters:
        assert all(math.isfinite(x) and x > 0 for x in (one.value, one.prior, one.spread))


@pytest.mark.parametrize("name", bundled_names())
def test_any_machine_can_be_simulated_without_a_model_of_its_own(name):
    known = load_bundled(name)
    model = model_for(known.machine, known.knowledge)
    assert model_from_json(encode_json(model), where="x") == model
    gpus = known.machine.gpu_indices
    (answer,) = Simulator(model).measure([parse_set(f"G{gpus[-1]}->G{gpus[-1]}->C0")])
    assert answer.assumed and answer.rate_gbps > 1


def test_a_link_of_half_the_speed_carries_half():
    fast = toy_machine(gpus=2)
    slow = msgspec.structs.replace(
        fast,
        gpus=tuple(
            msgspec.structs.replace(gpu, link=PciLink(speed_gts=8.0, width=16)) for gpu in fast.gpus
        ),
    )
    one = parse_set("G0->G0->G1")
    full, half = (Simulator(model_for(m)).measure([one])[0].rate_gbps for m in (fast, slow))
    assert half == pytest.approx(full / 2)


def test_links_that_report_nothing_are_taken_for_the_gpus_generation():
    machine = toy_machine(gpus=2)
    unknown = msgspec.structs.replace(
        machine,
        gpus=tuple(msgspec.structs.replace(gpu, link=PciLink(), sm=90) for gpu in machine.gpus),
    )
    (answer,) = Simulator(model_for(unknown)).measure([parse_set("G0->D0->C0")])
    assert 45 < answer.rate_gbps < 60


def test_nvlinks_through_a_switch_win_over_pci_and_nics_by_their_speed():
    machine = toy_machine(gpus=2)
    nvlinked = msgspec.structs.replace(
        machine,
        nvswitches=(NvSwitch(index=0),),
        nvlinks=tuple(NvLink(source=f"G{i}", target="S0", count=12) for i in range(2)),
        nics=(Nic(index=0, name="a", parent="C0", speed_mbps=100_000),),
    )
    simulator = Simulator(model_for(nvlinked))
    over_nvlink, over_network = simulator.measure(
        [parse_set("G0->D0->G1"), parse_set("G0->N0->N0")]
    )
    assert over_nvlink.rate_gbps > 100
    assert over_network.rate_gbps == pytest.approx(12.5)
