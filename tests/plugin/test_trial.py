"""The trial of the plugin with an NCCL newer than those known: what fails it, check by check."""

import re

import pytest

from tccl_py.errors import MeasurementError
from tccl_py.installation import install as trial
from tccl_py.nccl.communicators import CommunicatorLog
from tccl_py.nccl.plugin.index import INDEX_VARIABLE
from tccl_py.nccl.settings import Settings
from tccl_py.nccl.tuner import TunerEntry, TunerTable
from tccl_py.nccl.versions import NEWER_VARIABLE
from tccl_py.plan.machine_files import graph_text
from tests.plugin.runs import make_plan

NCCL = "2.33.1"
GIVEN = {"NCCL_ALGO": "Ring", "NCCL_BUFFSIZE": "131072"}
ENTRY = TunerEntry(
    collective="all_reduce", from_bytes=0, to_bytes=4096, algorithm="ring", protocol="ll"
)
TABLE = TunerTable(gpus=(0, 1, 2), measured_on=(0, 1, 2), entries=(ENTRY,))


@pytest.fixture
def plan(tmp_path):
    """Of three GPUs, where the first pair has no file."""
    buses = {gpu: f"0000:{16 + gpu:02x}:00.0" for gpu in range(3)}
    return make_plan(
        tmp_path, buses=buses, sizes=(2, 3), missing=[(0, 1)], given=GIVEN, tables=(TABLE,)
    )


class Nccl:
    """NCCL as its logs show it; `change` is given each log and its communicator's number."""

    def __init__(self, plan, change=lambda log, number: log):
        self.plan, self.change, self.environment, self.asked = plan, change, {}, []

    def __call__(self, environment, questions):
        self.environment, self.asked = environment, [question.gpus for question in questions]
        logs = [self.logs(gpus, number) for number, gpus in enumerate(self.asked)]
        return NCCL, logs

    def logs(self, gpus, number):
        orders = self.plan.orders.get(gpus)
        what = f"graph file {self.plan.file(gpus)} of x" if orders else "default NCCL: nothing"
        rings = orders or [gpus]
        channels = "".join(
            f"h:1:1 [0] NCCL INFO Channel {channel:02}/{2 * len(rings):02} : "
            f"{' '.join(str(gpus.index(gpu)) for gpu in ring)}\n"
            for channel, ring in enumerate(rings * 2)
        )
        read = "".join(f"NCCL INFO {n} set by environment to {v}.\n" for n, v in GIVEN.items())
        tuned = f"tccl: rank 0 of {len(gpus)}: tuned by x\n" if gpus == TABLE.gpus else ""
        texts = {"rate_gbps": 12.0, "type_intra": "SYS", "provenance": "made up"}
        dump = graph_text(rings, Settings(version="2.28"), **texts)
        return [
            CommunicatorLog(
                log=self.change(
                    f"NCCL INFO tccl: rank {rank} of {len(gpus)}: {what}\n"
                    f"{read if orders else ''}{tuned}{'' if rank else channels}",
                    number,
                ),
                dump="" if rank else dump,
            )
            for rank in range(len(gpus))
        ]


@pytest.fixture
def try_with(plan, monkeypatch):
    """Make a trial with an NCCL like this."""

    def run(change=lambda log, number: log, busy=""):
        nccl = Nccl(plan, change)
        monkeypatch.setattr(trial, "run_questions", nccl)
        monkeypatch.setattr(trial, "why_not_asked", lambda _: busy)
        return trial.try_plugin({INDEX_VARIABLE: str(plan.index)}, NCCL), nccl

    return run


def test_planned_and_other_communicators_in_turn_are_what_the_trial_sees(try_with):
    version, nccl = try_with()
    assert version == NCCL
    assert nccl.asked == [(0, 2), (0, 1), (0, 1, 2), (0, 2)]
    assert nccl.environment[NEWER_VARIABLE] == NCCL


def after(number, old, new):
    """Change what the logs of a communicator and of later ones say."""
    return lambda log, at: re.sub(old, new, log) if at >= number else log


FAULTS = {
    "the number of ranks is at another place": (
        after(0, "rank . of .: .*", "default NCCL: this NCCL does not show the number of ranks"),
        "GPUs 0,2 the plugin says 'tccl: default NCCL: this NCCL does not show",
    ),
    "nothing is asked of the network half": (after(0, "tccl: .*", ""), "the plugin says ''"),
    "a rank decides before the other has posted": (
        after(0, "rank 1 of .: .*", "rank 1 of 2: default NCCL: 1 posts for 2 ranks"),
        "1 posts for 2 ranks",
    ),
    "the decision reaches no question for a graph file": (
        after(2, r"(Channel 0[13]/0\d :) 0 (.) (.)", r"\1 0 \3 \2"),
        "GPUs 0,1,2",
    ),
    "variables are read once per process": (
        after(1, "NCCL_BUFFSIZE set.*", ""),
        "GPUs 0,1,2 NCCL reads {'NCCL_ALGO': 'Ring'}, and not",
    ),
    "a variable of one communicator stays for the next": (
        lambda log, number: log + "NCCL_BUFFSIZE set by environment to 131072.\n" * (number == 1),
        "GPUs 0,1 NCCL reads {'NCCL_BUFFSIZE': '131072'}, and not none",
    ),
    "the tuner has another interface": (
        after(2, ".*tuned by.*", ""),
        "GPUs 0,1,2 NCCL asks no tuner",
    ),
    "a communicator without a table is tuned": (
        lambda log, number: log + "tccl: rank 0 of 2: tuned by x\n" * (number == 3),
        "GPUs 0,2 NCCL asks the tuner",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_check_fails_the_trial(try_with, fault):
    change, words = FAULTS[fault]
    with pytest.raises(MeasurementError, match="in a communicator over GPUs") as failed:
        try_with(change)
    assert words in str(failed.value)


def test_a_trial_that_cannot_be_made_fails(try_with, plan):
    with pytest.raises(MeasurementError, match="GPU 0 is in use"):
        try_with(busy="GPU 0 is in use")
    with pytest.raises(MeasurementError, match="several hosts"):
        trial.try_plugin({"TCCL_JOB": "/job"}, NCCL)
