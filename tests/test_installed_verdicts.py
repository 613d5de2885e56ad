"""Verdicts on graph files from the answer of an installed NCCL, and settings out of range."""

import pytest

from tccl_py.errors import InputError
from tccl_py.nccl.asked import NcclAnswer, verdict_on
from tccl_py.nccl.graph_file import parse_graph_file
from tccl_py.nccl.settings import Settings, check_settings
from tccl_py.nccl.versions import RING
from tccl_py.plan.machine_files import graph_text

GPUS = (4, 5, 6, 7)
ORDERS = ((4, 5, 6, 7), (4, 6, 5, 7))


def file_of(*orders):
    return graph_text(
        orders, Settings(version="2.28"), rate_gbps=20.0, type_intra="SYS", provenance="made up"
    )


def answer(rings, text):
    """What NCCL says that loaded a file with the graph of `text`, and runs these rings."""
    graph = parse_graph_file(text, where="dump", version="2.28")[RING]
    return NcclAnswer(version="2.28.9", gpus=GPUS, rings=rings, graph=graph, via={}, fallback=False)


def test_a_file_is_used_whose_channels_run_twice_from_whatever_gpu():
    turned = ((5, 6, 7, 4), (6, 5, 7, 4))
    found = verdict_on(answer(ORDERS + turned, file_of(*ORDERS)), file_of(*ORDERS), where="g.xml")
    assert found.verdict == "used"
    # Rings are ranks.
    assert found.rings[:2] == ((0, 1, 2, 3), (0, 2, 1, 3))


def test_a_file_is_ignored_where_nccl_searched_for_itself():
    other = answer(ORDERS[:1] * 2, file_of(*ORDERS[:1]))
    assert verdict_on(other, file_of(*ORDERS), where="g.xml").verdict == "ignored"
    assert verdict_on(other, "", where="g.xml").verdict == "ignored"


@pytest.mark.parametrize("rings", [ORDERS[:1], ORDERS[::-1] * 2])
def test_a_file_is_clipped_whose_channels_do_not_all_run_in_its_order(rings):
    found = verdict_on(answer(rings, file_of(*ORDERS)), file_of(*ORDERS), where="g.xml")
    assert found.verdict == "clipped"


def test_a_file_that_nccl_took_against_its_rules_has_no_verdict():
    text = file_of(*ORDERS)
    with pytest.raises(InputError, match=r"g\.xml"):
        verdict_on(answer(ORDERS * 2, text), text.replace("<graph ", "<graph\t"), where="g.xml")


@pytest.mark.parametrize(
    "wrong",
    [
        {"channels": 0},
        {"min_channels": 8, "max_channels": 4},
        {"max_channels": 1000},
        {"buffsize": 512},
    ],
)
def test_settings_that_nccl_cannot_follow_are_refused(wrong):
    with pytest.raises(InputError):
        check_settings(Settings(**wrong))
