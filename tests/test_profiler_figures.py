"""How good the profiler was on hardware, computed from what it measured there.

The figures are of 4x H200 with NCCL 2.28.9 and NCCL_NVLS_ENABLE=0; see CHANGELOG.md.
"""

import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = 32 * 1024 * 1024
"""All FIFOs of a ring together, in bytes: beyond it the host's caches decide, and vary."""


@pytest.fixture(scope="module")
def script():
    path = REPOSITORY / "scripts" / "profiler_figures.py"
    spec = importlib.util.spec_from_file_location("profiler_figures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(script):
    return script.figures(script.KEPT)


def test_lanes_start_within_microseconds_and_run_together(found):
    assert found.skew_us <= 5
    assert found.worst_skew_us <= 5
    assert found.skew_error_us <= 5
    assert found.worst_overlap >= 0.98


def test_the_same_set_measured_again_gives_the_same(found):
    assert found.direct_same_pool <= 0.01
    assert found.bounce_same_pool <= 0.02


def test_a_direct_ring_predicts_nccl_within_a_tenth(found):
    (direct,) = [one for one in found.predictions if one.direct]
    assert abs(direct.error) <= 0.10


def test_bounce_rings_predict_nccl_in_the_same_run(found):
    errors = sorted(abs(one.error) for one in found.predictions if not one.direct)
    assert len(errors) == 8
    # Two of eight are farther off than asked: rings of one and two channels with large FIFOs.
    assert sum(error <= 0.10 for error in errors) == 6
    assert errors[-1] <= 0.15
    assert found.best_found == 1


def test_rings_whose_fifos_fit_the_cache_predict_nccl_on_another_day(found):
    gpus = 4
    small = [one for one in found.sweep if 2 * one.channels * one.fifo_bytes * gpus <= SMALL]
    assert len(small) >= 15
    assert max(abs(one.error) for one in small) <= 0.10


def test_the_report_names_every_figure(script, found):
    text = script.report(found)
    assert "in a new pool (worst of all sets): direct not measured" in text
    assert text.count("| G0->D0->C0 |") == 1
