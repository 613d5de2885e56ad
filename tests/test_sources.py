"""What holds for every source of measurements: models, the bench, its journal, the profiler."""

import math
from contextlib import contextmanager

import pytest

from tccl_py.errors import InputError, MeasurementError
from tccl_py.model.measurement import BandwidthSource
from tccl_py.model.transfer import parse_set
from tccl_py.simulator.descriptions import load_bundled, model_for
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import JournalFile, RecordedSource
from tccl_py.sources.opening import open_source
from tccl_py.sources.profiled import MeasurementOptions, measured_machine
from tests.planned import SMALL
from tests.toy import toy_machine

BOX = load_bundled(SMALL)
SETS = [parse_set(text) for text in ("G0->G0->G1", "G1->G1->G0 G0->G0->C0->G1->G1", "G1->G1->C0")]


@contextmanager
def journal(place, below=lambda path, header: None):
    """A bench whose answers are those of its journal; what is below it measures nothing."""
    path, header = place / "journal.jsonl", Simulator(BOX).header
    with Bench(Simulator(BOX), journal=JournalFile(path, header)) as first:
        first.measure(SETS)
    with Bench(below(path, header), journal=JournalFile(path, header)) as again:
        yield again


def on_host(place):
    return open_source(
        measured_machine("host", 2), options=MeasurementOptions(target=0.9, repeats=6)
    )


@contextmanager
def given(source):
    yield source


SOURCES = {
    "a model": lambda _: given(Simulator(BOX)),
    "a model with noise": lambda _: given(Simulator(BOX, noise=0.05, seed=3)),
    "a model of any machine": lambda _: given(Simulator(model_for(toy_machine(gpus=2)))),
    "a bench": lambda _: given(Bench(Simulator(BOX))),
    "a source by its name": lambda _: open_source(SMALL),
    "a journal": journal,
    "a recorded machine": lambda place: journal(place, RecordedSource),
    "the profiler on host memory": on_host,
}


@pytest.fixture(params=SOURCES)
def source(request, tmp_path):
    with SOURCES[request.param](tmp_path) as opened:
        yield opened


def test_a_source_answers_each_set_in_the_order_asked_with_rates_for_each_flow(source):
    assert isinstance(source, BandwidthSource)
    asked = [*SETS, SETS[0]]
    answers = source.measure(asked)
    assert [one.transfers for one in answers] == asked
    for one in answers:
        assert one.simulated is source.simulated
        assert len(one.samples_gbps) == len(one.transfers) == len(one.gbps)
        assert all(0 < rate < math.inf for row in one.samples_gbps for rate in row)
        assert one.rate_gbps == min(one.gbps)
    assert list(source.measure([])) == []
    # A text, or a flow, is a set.
    for form in (str(SETS[0]), SETS[0].flows[0]):
        assert source.measure(form)[0].transfers == SETS[0]


@pytest.mark.parametrize("text", ["G0->G0->G9", "h3.G0->h3.G0->h3.G1"])
def test_a_set_that_cannot_run_is_refused_by_name_and_the_next_one_is_answered(source, text):
    with pytest.raises((InputError, MeasurementError)) as refused:
        source.measure([parse_set(text)])
    assert any(name in str(refused.value) for name in ("G9", "h3", "not in "))
    (answer,) = source.measure(SETS[:1])
    assert answer.transfers == SETS[0]
