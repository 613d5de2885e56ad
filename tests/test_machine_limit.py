"""The machine's limit: bare copies over the hops of a plan's recommended choice."""

import json

import msgspec
import pytest

from tccl_profiler.precision import Stopping, WindowLimits
from tccl_profiler.profiler import Profiler
from tccl_py.errors import MeasurementError
from tccl_py.experiments.target import Target
from tccl_py.model.rings import Hop, bounce, ring, ring_like, ring_set
from tccl_py.model.transfer import Fifo, parse_set
from tccl_py.plan.text import CHOICE_WORDS, limit_text, show_plan, summary
from tccl_py.planning.planner import bare_copies, limit_gbps, make_plan
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tests.commands import tccl
from tests.fakes import space_of
from tests.planned import PCIE, SMALL, plan_of, replace_plan
from tests.profiler_pools import options, pool_of
from tests.test_kept import kept_plan
from tests.test_reference_plans import PLANS


def bouncing(order, *, blocks, size):
    """One ring of bounces through NUMA node 0."""
    fifo = Fifo(bytes=size)
    pairs = zip(order, (*order[1:], order[0]), strict=True)
    hops = [Hop(i, j, bounce(i, j, 0, blocks=blocks, fifo=fifo)) for i, j in pairs]
    return ring_set([ring(hops)])


class Refusing:
    """A source that fails on plain transfers: with an error, or as if Ctrl-C came."""

    simulated = True

    def __init__(self, name, error):
        self.inner, self.error = Simulator(load_bundled(name)), error

    def measure(self, sets):
        if any("->D" in str(one) or "buffer" in str(one) for one in sets):
            raise self.error
        return self.inner.measure(sets)


def plan_from(source, name):
    model = load_bundled(name)
    return make_plan(model.machine, model.knowledge, source)


def text_of(plan):
    return "\n".join(" ".join(row) for row in summary(plan))


def test_bare_copies_are_a_plain_transfer_for_each_transfer_of_a_hop():
    rings = bouncing((0, 1), blocks=2, size=1 << 20)
    assert str(bare_copies(rings, copy_engine=True)) == (
        "C0->D0->G0{buffer=2M} C0->D1->G1{buffer=2M} G0->D0->C0{buffer=2M} G1->D1->C0{buffer=2M}"
    )
    direct = ring_set([ring_like(space_of(range(3)), (0, 1, 2))])
    assert str(bare_copies(direct, copy_engine=False)) == "G0->G0->G1 G1->G1->G2 G2->G2->G0"
    assert str(bare_copies(direct, copy_engine=True)) == "G0->D0->G1 G1->D1->G2 G2->D2->G0"


def test_the_limit_of_direct_hops_is_the_better_of_copy_engines_and_kernels():
    plan = plan_of(SMALL)
    pairs = [(hop.source, hop.target) for hop in plan.rings[0].hops]
    copies = [" ".join(f"G{i}->{by}{i}->G{j}" for i, j in pairs) for by in "DG"]
    measured = Simulator(load_bundled(SMALL)).measure([parse_set(text) for text in copies])
    assert plan.limit_gbps == max(one.rate_gbps for one in measured)
    assert plan.limit_gbps > plan.choices["default"].rate_gbps


def test_the_limit_of_bounces_is_through_buffers_as_small_as_their_fifos():
    plan = kept_plan(SMALL)
    large = parse_set(
        " ".join(f"G{i}->D{i}->C0{{buffer=256M}} C0->D{i}->G{i}{{buffer=256M}}" for i in range(4))
    )
    (measured,) = Simulator(load_bundled(SMALL)).measure([large])
    best = plan.choices[plan.recommended].rate_gbps
    assert measured.rate_gbps < best <= plan.limit_gbps


@pytest.mark.parametrize("mib", [1, 4, 16])
def test_a_write_and_a_read_through_equal_buffers_take_the_cache_of_one_fifo(mib):
    rings = bouncing((0, 1, 2, 3), blocks=8, size=mib << 20)
    bare = bare_copies(rings, copy_engine=False)
    copies, bounces = Simulator(load_bundled(SMALL)).measure([bare, rings.flows])
    assert copies.rate_gbps == pytest.approx(bounces.rate_gbps, rel=0.01)


def test_a_limit_that_no_source_can_measure_is_left_out():
    plan = plan_from(Refusing(SMALL, MeasurementError("no plain transfers")), SMALL)
    # Kernels without a FIFO are measured all the same.
    assert plan.limit_gbps == pytest.approx(360.8)
    plan = plan_from(Refusing(PCIE, MeasurementError("no plain transfers")), PCIE)
    assert plan.limit_gbps is None
    assert show_plan(plan).limit_gbps is None
    assert "limit" not in text_of(plan)
    assert not plan.cancelled


def test_an_interrupt_while_the_limit_is_measured_keeps_the_plan():
    plan = plan_from(Refusing(PCIE, KeyboardInterrupt()), PCIE)
    whole = plan_of(PCIE)
    assert (plan.limit_gbps, plan.cancelled) == (None, True)
    assert (plan.rings, plan.rate_gbps) == (whole.rings, whole.rate_gbps)


def test_a_limit_by_assumed_values_is_not_given_for_a_plan_without_them():
    rings = bouncing((0, 1, 2, 3), blocks=2, size=1 << 20)
    source = Simulator(load_bundled(PCIE))
    assert limit_gbps(source, rings, assumed=True) > 0
    assert limit_gbps(source, rings, assumed=False) is None


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.5, "the plan gets 50% of it"),
        (1.005, "the plan gets 100% of it"),
        (1.2, "no faster than the plan"),
    ],
)
def test_the_text_says_how_close_the_plan_is_to_the_limit(share, words):
    plan = plan_of(PCIE)
    rate = plan.choices[plan.recommended].rate_gbps
    plan = msgspec.structs.replace(plan, limit_gbps=rate / share)
    line = next(one for one in text_of(plan).splitlines() if one.startswith("limit"))
    assert f"{rate / share:.2f} GB/s ({plan.provenance}): bare copies over" in line
    assert words in line


def test_a_share_of_the_limit_that_the_recommended_choice_has_not_is_said_of_the_fastest():
    plan = plan_of(PCIE)
    assert plan.recommended != "default"
    fastest = plan.recommended
    plan = msgspec.structs.replace(plan, limit_gbps=2 * plan.rate_gbps, winner="default")
    assert limit_text(plan).endswith(f"{CHOICE_WORDS[fastest]} would get 50% of it")


def test_a_choice_that_is_faster_by_less_than_a_percent_has_no_share_of_its_own():
    plan = plan_of(PCIE)
    rate = plan.rate_gbps
    variables = msgspec.structs.replace(plan.choices["variables"], predicted_gbps=1.005 * rate)
    plan = replace_plan(plan, variables=variables, winner="graph", limit_gbps=2 * rate)
    assert limit_text(plan).endswith("the plan gets 50% of it")


def test_a_plan_with_tuned_settings_has_no_limit(tmp_path):
    plan = plan_of(SMALL)
    tunable = Target(plan=plan, directory=tmp_path, graphs={})
    settings = msgspec.structs.replace(plan.settings, channels=4)
    rates = {"default": 290.0, "graph": 300.0}
    tuned = tunable.retune({"graph": settings}, rates).plan
    assert (tuned.limit_gbps, limit_text(tuned)) == (None, "")


def test_the_json_has_the_limit():
    shown = tccl("show", str(PLANS / f"{SMALL}.json"), "--json")
    assert json.loads(shown.stdout)["limit_gbps"] == pytest.approx(371.7)


def test_host_memory_is_measured_as_it_is():
    rings = bouncing((0, 1), blocks=1, size=256 << 10)
    with pool_of() as pool:
        # On cores that others use as well, lanes may not run together at first.
        for maximum_ms in (5, 50, 500):
            limits = WindowLimits(minimum_ms=1, maximum_ms=maximum_ms, longest_ms=maximum_ms)
            quick = options(limits=limits, stopping=Stopping(minimum=3, limit=3))
            found = limit_gbps(Profiler(pool, options=quick), rings, assumed=False)
            if found is not None:
                break
    assert found is not None
    assert found > 0
