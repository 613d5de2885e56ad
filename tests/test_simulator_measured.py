"""The bundled models against everything that was measured on the real machines."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest

from scripts.simulator_fit import (
    Fit,
    Observation,
    read_observations,
    read_published,
    relative_errors,
)
from tccl_py.model.transfer import parse_set
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.model import Parameters, bundled_parameters
from tccl_py.simulator.source import Simulator

MEASURED = Path(__file__).parent / "cases" / "measured"
ROWS = read_observations(MEASURED)
SETS = [row for row in ROWS if row.kind == "set"]
NCCL = [row for row in ROWS if row.kind == "nccl"]
MATRIX = [row for row in ROWS if row.kind == "matrix"]


def label(row: Observation) -> str:
    return row.label[:90]


@cache
def simulator(machine: str) -> Simulator:
    return Simulator(load_bundled(machine))


@cache
def sharing_alone(machine: str) -> Simulator:
    return Simulator(msgspec.structs.replace(load_bundled(machine), congestion=()))


def worst_error(row: Observation) -> float:
    (answer,) = simulator(row.machine).measure([row.transfers])
    return max(abs(error) for error in relative_errors(row, answer.gbps))


def test_every_machine_with_measured_sets_is_there():
    counted = {name: sum(row.machine == name for row in SETS) for name in {r.machine for r in SETS}}
    assert counted == {"asus-esc8000a-e13p": 8, "wrx90-16gpu-4switch": 4, "h200x4-vm": 14}


@pytest.mark.parametrize("row", SETS, ids=label)
def test_a_measured_set_is_predicted_within_25_percent(row):
    assert worst_error(row) < 0.25


def test_most_measured_sets_are_predicted_within_15_percent():
    assert sum(worst_error(row) < 0.15 for row in SETS) >= 0.9 * len(SETS)


@pytest.mark.parametrize("row", SETS, ids=label)
def test_a_set_collapses_in_the_model_where_it_does_in_the_measurement_and_nowhere_else(row):
    (answer,) = simulator(row.machine).measure([row.transfers])
    (shared,) = sharing_alone(row.machine).measure([row.transfers])
    half = shared.total_gbps / 2
    assert (answer.total_gbps < half) == (row.total < half)


def test_two_measured_sets_are_collapses():
    collapsed = [
        row.machine
        for row in SETS
        if row.total < sharing_alone(row.machine).measure([row.transfers])[0].total_gbps / 2
    ]
    assert collapsed == ["asus-esc8000a-e13p", "wrx90-16gpu-4switch"]


@pytest.mark.parametrize("row", SETS, ids=label)
def test_figures_behind_a_measured_set_are_not_assumed(row):
    (answer,) = simulator(row.machine).measure([row.transfers])
    assert answer.simulated and not answer.assumed


@pytest.mark.parametrize("row", NCCL, ids=label)
def test_a_ring_of_nccls_kernels_is_predicted_within_25_percent(row):
    assert worst_error(row) < 0.25


def test_the_best_bounce_settings_of_nccl_stay_the_best():
    bounced = [row for row in NCCL if row.transfers.flows[0].is_bounce]
    predicted = {
        row.transfers: simulator(row.machine).measure([row.transfers])[0].rate_gbps
        for row in bounced
    }
    top = max(predicted.values())
    best = max(row.gbps[0] for row in bounced)
    # Repeated runs of the same settings differ by 5 %, and the best is the luckiest of many:
    # 8 ring channels of 512 KiB were measured at 37.9, 39.5 and 39.6.
    assert all(
        row.gbps[0] > 0.92 * best for row in bounced if predicted[row.transfers] > 0.99 * top
    )
    assert max(predicted[row.transfers] for row in bounced if row.gbps[0] == best) > 0.99 * top


@pytest.mark.parametrize("row", MATRIX, ids=label)
def test_a_pair_both_ways_is_predicted_within_25_percent(row):
    assert worst_error(row) < 0.25


def test_single_writes_of_the_published_matrix_are_predicted_within_25_percent():
    data = json.loads((MEASURED / "asus-esc8000a-e13p.json").read_text())
    for source, rates in enumerate(data["single_transfer_matrix_gbps"]):
        for target, rate in enumerate(rates):
            if rate is not None:
                one = parse_set(f"G{source}->D{source}->G{target}")
                (answer,) = simulator("asus-esc8000a-e13p").measure([one])
                assert answer.total_gbps == pytest.approx(rate, rel=0.25)


FIT = Fit((*ROWS, *read_published()))
FITS = 3
"""So many fits leave each set out of one; that others are left out with it makes it harder."""


@cache
def fitted_without(fit: int) -> Parameters:
    return FIT.parameters(leave_out=[ROWS.index(row) for row in SETS[fit::FITS]])


def test_the_bundled_parameters_are_what_the_fit_gives():
    fitted, bundled = (
        {part.name: part.value for part in found.parameters}
        for found in (FIT.parameters(), bundled_parameters())
    )
    assert fitted == pytest.approx(bundled, rel=0.03)


@pytest.mark.parametrize("left_out", SETS, ids=label)
def test_leaving_a_set_out_of_the_fit_moves_its_prediction_by_less_than_25_percent(left_out):
    known = FIT.predict(left_out, bundled_parameters())
    found = FIT.predict(left_out, fitted_without(SETS.index(left_out) % FITS))
    assert found == pytest.approx(known, rel=0.25)
    assert max(abs(e) for e in relative_errors(left_out, found)) < 0.25


def test_a_folder_without_measured_sets_is_refused(tmp_path):
    with pytest.raises(Exception, match="holds no measured set"):
        read_observations(tmp_path)


def test_a_file_of_another_kind_is_refused_by_name(tmp_path):
    (tmp_path / "other.json").write_text("[1, 2]")
    with pytest.raises(Exception, match=r"other.json: "):
        read_observations(tmp_path)
