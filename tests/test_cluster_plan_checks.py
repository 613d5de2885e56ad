"""A plan that somebody has edited is refused by one sentence that says where and what."""

import contextlib
import functools
import itertools
import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tccl_py.errors import InputError, TcclError
from tccl_py.files import MAX_INPUT_BYTES, encode_json
from tccl_py.nccl.settings import Settings
from tccl_py.plan.directory import nccl_files
from tccl_py.plan.load import check_plan, load_plan, off_rails
from tests.cluster_plans import FOUR, LOCAL, cluster_plan, mixed
from tests.commands import tccl
from tests.planned import PCIE, plan_of

HUGE = 10**40


def saved(plan):
    return json.loads(encode_json(plan))


def refused(data, tmp_path):
    """The sentence by which an edited plan is refused."""
    path = tmp_path / "plan.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(InputError) as caught:
        load_plan(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert len(text) < len(str(path)) + 700
    assert text.isprintable()
    return text


def at(data, path):
    """The dictionary or list that has a place such as paths/0/chains, and the place's key."""
    *way, last = (int(key) if key.lstrip("-").isdigit() else key for key in path.split("/"))
    for key in way:
        data = data[key]
    return data, last


CIRCLE = [{"bus_id": "a", "parent": "b"}, {"bus_id": "b", "parent": "a"}]
EDITS_OF_ONE_HOST = [
    ("format_version", 1, "has format version 1; this program reads version 3"),
    ("format_version", "one", "Expected `int`, got `str`"),
    ("colour", "red", "`colour`); give a file this program wrote, or update"),
    ("paths/0/chains", [], "has 0 rings for 1 channels"),
    ("paths/0/chains/0/hops", [], "visits GPUs []; each of"),
    ("class_gpus/0", [0, 1, 2, 9], "is for GPUs [0, 1, 2, 9]"),
    ("class_gpus/0", [0, 1, 2, 2], "is for GPUs [0, 1, 2, 2]"),
    ("class_gpus/0", [0, 1, 2], "each of [0, 1, 2] once"),
    ("class_gpus/0", [0], "each of [0] once"),
    ("paths/0/chains/0/hops/0/target", 0, "do not meet"),
    ("paths/0/chains/0/hops/0/flow", "hello", "'hello'"),
    ("paths/0/chains/0/hops/0/flow", "G1->G1->G0", "has a hop with flow 'G1->G1->G0'"),
    ("subsets/0/rings/0", [0, 3], "ring [0, 3] does not visit [0, 1] once"),
    ("subsets/0/gpus", [0, 7], "is for GPUs [0, 7]"),
    ("choices/default/rings/0", [0, 1], "ring [0, 1] does not"),
    ("choices/graph/predicted_gbps", -1.0, "predicted_gbps`"),
    ("paths/0/chains/0/hops/0/gbps", 0.0, "chains[0].hops[0].gbps`"),
    ("subsets/0/rate_gbps", 1e300, "`$.subsets[0].rate_gbps`"),
    ("limit_gbps", 0.0, "`$.limit_gbps`"),
    ("cluster", None, "does not fit"),
    ("choices/graph/predicted_gbps", math.nan, "does not fit"),
    ("choices/graph/predicted_gbps", math.inf, "does not fit"),
    ("bound_gbps", 0.5, "and bound 0.5"),
    ("choices/graph/settings/channels", 0, "settings.channels"),
    ("choices/graph/settings/channels", 1000000000, "channels is 1000000000"),
    ("choices/graph/settings/version", "new", "is no version"),
    ("paths/0/type_intra", '"/>', "`$.paths[0].type_intra`"),
    ("cluster/classes/0/machine/bridges", CIRCLE, "the PCI tree turns in a circle"),
    ("cluster/classes/0/machine/gpus", [], "has no GPU"),
]
EDITS_OF_SEVERAL = [
    ("hosts/0/name", "../../etc/x", "host '../../etc/x' once in its order"),
    ("cluster/hosts/0/name", "a/b", "'a/b' cannot be a name"),
    ("cluster/hosts/0/name", "gpu2", "names host gpu2 twice"),
    ("cluster/hosts/0/name", "x" * 5000, "has 5000 characters; at most 240"),
    ("cluster/hosts/0/name", "\x1b[31m", "cannot be a name here"),
    ("cluster/classes/0/name", "../x", "'../x' cannot be a name here"),
    ("cluster/hosts/0/node_class", HUGE, "there are 3 classes, counted from 0"),
    ("cluster/hosts/0/slots", 3, "has 3 ranks for GPUs [0, 1, 2, 3]"),
    ("cluster/format_version", 2, "has format version 2"),
    ("hosts/1/name", "gpu3", "host 'gpu3' once"),
    ("hosts", [], "host 'gpu1' once"),
    ("hosts/0/path", HUGE, "$.hosts[0].path"),
    ("hosts/0/path", 3, "has path 3 of 3"),
    ("hosts/0/path", -1, "$.hosts[0].path"),
    ("hosts/0/path", 1, "has a path of class"),
    ("hosts/1/first_rank", HUGE, "$.hosts[1].first_rank"),
    ("hosts/1/first_rank", 5, "begins with rank 5"),
    ("class_gpus", [[0]], "has GPUs for 1 classes"),
    ("class_gpus/0", [0, 1, 2, 10000000000000000000000000000000000000000], "$.class_gpus[0][3]"),
    ("class_gpus/0", [3, 2, 1, 0], "some of [0, 1, 2, 3], each once"),
    ("class_gpus/0", [0, 0, 1, 2], "each once and in ascending"),
    ("class_gpus/0", [], "visits GPUs [1, 0, 2, 3]"),
    ("paths", [], "has no paths"),
    ("paths/1/node_class", 9, "path 1: is of class 9"),
    ("paths/1/node_class", -1, "$.paths[1].node_class"),
    ("paths/1/chains", [], "path 1: has 0 chains, path 0 has 2"),
    ("paths/0/type_intra", "FAR", "$.paths[0].type_intra"),
    ("paths/0/type_inter", "<net>" * 99, "$.paths[0].type_inter"),
    ("paths/0/chains/0/hops", [], "visits GPUs []"),
    ("paths/0/chains/0/hops/1/source", 2, "visits GPUs [2, 0, 2, 3]"),
    ("paths/0/chains/0/hops/1/source", HUGE, "$.paths[0].chains[0].hops[1].source"),
    ("paths/0/chains/0/hops/1/target", 2, "do not meet"),
    ("paths/0/chains/0/entry_nic", HUGE, "$.paths[0].chains[0].entry_nic"),
    ("paths/0/chains/0/entry_nic", 1, "flow 'N0->N0->G1{blocks=2}'; it goes from N1 to G1"),
    ("paths/0/chains/0/exit_nic", 0, "flow 'G3->N1->N1{blocks=2}'; it goes from G3 to N0"),
    ("paths/0/chains/0/exit_nic", -1, "$.paths[0].chains[0].exit_nic"),
    ("paths/0/chains/0/hops/0/flow", "nonsense", "'nonsense'"),
    ("paths/0/chains/0/hops/0/flow", "N0->N0->G0", "has a hop with flow 'N0->N0->G0'"),
    ("paths/0/chains/0/hops/0/flow", "G1->N0->N0", "flow 'G1->N0->N0'; it goes from N0"),
    ("paths/0/chains/0/hops/0/flow", "b.G1->b.N0->a.N0->a.N0->a.G1", "and no 'b.G1'"),
    ("paths/0/chains/0/hops/0/flow", "N0->N0->C7->G1->G1", "and no 'C7'"),
    ("paths/0/chains/0/hops/-1/flow", "N1->N1->G3", "has a hop with flow 'N1->N1->G3'"),
    ("paths/0/chains/0/hops/-1/flow", "G3->G3->G9->N1->N1", "and no 'G9'"),
    ("paths/0/chains/0/hops/1/flow", "G1->G1->G2", "flow 'G1->G1->G2'; it goes from G1"),
    ("paths/0/chains/0/hops/1/flow", "G1->N0->N0", "flow 'G1->N0->N0'; it goes from G1"),
    ("paths/0/chains/0/hops/2/gbps", -3.0, "$.paths[0].chains[0].hops[2].gbps"),
    ("choices/graph/settings/channels", 3, "has 2 rings for 3 channels"),
    ("choices/graph/settings/channels", 0, "settings.channels"),
    ("choices/graph/settings/cross_nic", 0, "with NCCL_CROSS_NIC=0 both are the same"),
    ("choices/graph/settings/ib_hca", ["mlx5_0"], "left by NIC 1; the settings let"),
    ("choices/graph/settings/ib_hca", ["$(reboot)"], "settings.ib_hca[0]"),
    ("choices/graph/settings/version", "9", "9"),
    ("choices/graph/predicted_gbps", 1e300, "$.choices[...].predicted_gbps"),
    ("choices/graph/predicted_gbps", 13.0, "has rate 13.0 and bound 12.5"),
    ("bound_gbps", 1000000000.0, "$.bound_gbps"),
    ("whole_ring_gbps", 0.0, "$.whole_ring_gbps"),
    ("choices/default/predicted_gbps", 0, "$.choices[...].predicted_gbps"),
    ("choices/default/rings", [[0, 1]], "ring [0, 1] does not visit"),
    ("sets_measured", -HUGE, "$.sets_measured"),
    ("format_version", 7, "has format version 7"),
    ("kind", 5, "does not fit the plan format"),
    ("cluster/rails", "only", "has rings that change NICs"),
]
EDITS = [
    *((functools.partial(plan_of, PCIE), *edit) for edit in EDITS_OF_ONE_HOST),
    *((mixed, *edit) for edit in EDITS_OF_SEVERAL),
]


@pytest.mark.parametrize("plan, path, value, sentence", EDITS)
def test_an_edited_plan_is_refused_by_one_sentence(plan, path, value, sentence, tmp_path):
    data = saved(plan())
    inside, key = at(data, path)
    inside[key] = value
    assert sentence in refused(data, tmp_path)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("plan", "does not fit the plan format (JSON is malformed"),
        ("", "is empty"),
        ("[]", "does not fit"),
        ('{"format_version":2,"cluster":{"hosts":[' + "[" * 10**6, "is nested too deep"),
        (" " * (MAX_INPUT_BYTES + 1), "is larger than"),
    ],
    ids=len,
)
def test_a_file_that_is_no_plan_is_refused_by_one_sentence(text, sentence, tmp_path):
    assert sentence in refused(text, tmp_path)


@pytest.mark.parametrize("field", ["hosts", "choices", "paths", "simulated", "class_gpus"])
def test_a_plan_without_one_of_its_fields_is_refused(field, tmp_path):
    data = saved(mixed())
    del data[field]
    assert f"missing required field `{field}`" in refused(data, tmp_path)


def test_a_chain_has_to_begin_where_it_enters_its_host(tmp_path):
    data = saved(mixed())
    chains, first = at(data, "paths/0/chains/0")
    *rest, last = chains[first]["hops"]
    chains[first]["hops"] = [last, *rest]
    assert "stays on its host" in refused(data, tmp_path)


def test_a_host_that_is_missing_from_the_order_is_named(tmp_path):
    data = saved(mixed())
    del data["hosts"][-1]
    assert "does not have host 'login' once in its order" in refused(data, tmp_path)


def test_rings_that_change_nics_on_hosts_may_stay_on_rails(tmp_path):
    chains = {"a": ((0, (0, 1, 2, 3), 1),), "b": ((1, (0, 1, 2, 3), 0),)}
    plan = cluster_plan([("a", FOUR), ("b", FOUR)], chains)
    (chain,) = plan.paths[0].chains
    assert not off_rails(plan) and chain.entry_nic != chain.exit_nic
    data = saved(plan)
    data["cluster"]["rails"] = "only"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert load_plan(tmp_path).orders == plan.orders


@pytest.mark.parametrize("nics", [*itertools.product((0, 1), repeat=6)])
def test_every_step_stays_on_its_rail_also_that_from_the_last_host_to_the_first(nics):
    entries, exits = nics[::2], nics[1::2]
    chains = {
        name: ((into, (0, 1, 2, 3), out),)
        for name, into, out in zip("abc", entries, exits, strict=True)
    }
    plan = cluster_plan([(name, FOUR) for name in "abc"], chains)
    off = exits != (*entries[1:], entries[0])
    assert off_rails(plan) == off
    rails = msgspec.structs.replace(plan.cluster, rails="only")
    with pytest.raises(InputError) if off else contextlib.nullcontext():
        check_plan(msgspec.structs.replace(plan, cluster=rails), where="plan")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999", "1" * 400])
def test_numbers_that_are_none_are_refused(number, tmp_path):
    text = json.dumps(saved(mixed())).replace(
        '"predicted_gbps": 10.0', f'"predicted_gbps": {number}'
    )
    assert "does not fit" in refused(text, tmp_path)


def test_a_plan_nested_too_deep_is_refused(tmp_path):
    head = '{"format_version": 2, "cluster": '
    assert "nested too deep" in refused(head + '{"hosts": [' + "[" * 100_000, tmp_path)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.just(HUGE),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "..", "../x", "a/b", "gpu1", "\x00", "G0->G0->G1", "N0->N0->G0", "SYS"]),
    st.sampled_from([[], {}, [0], [[[]]], {"a": 1}, 10**9, 1e308]),
)


def places(data, path=""):
    """Where something stands in a plan that somebody may have edited."""
    yield path
    if path.startswith("/cluster/classes/0"):
        return  # machines have tests of their own
    inside = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in inside:
        if isinstance(value, (dict, list)):
            yield from places(value, f"{path}/{key}")
        else:
            yield f"{path}/{key}"


def edits_of(plan):
    """Edits of a plan's JSON, and the plan."""
    where = [path[1:] for path in places(saved(plan)) if path]
    edits = st.lists(st.tuples(st.sampled_from(where), ODD), min_size=1, max_size=2)
    return st.tuples(st.just(plan), edits)


@settings(max_examples=200, deadline=None)
@given(st.one_of(edits_of(mixed()), edits_of(plan_of(PCIE))))
def test_whatever_is_edited_a_plan_is_usable_or_refused(tmp_path_factory, edited):
    plan, edits = edited
    data = saved(plan)
    for path, value in edits:
        try:
            inside, key = at(data, path)
            inside[key] = value
        except (KeyError, IndexError, TypeError):
            continue  # what the first edit took away
    place = tmp_path_factory.getbasetemp() / "edited"
    place.mkdir(exist_ok=True)
    (place / "plan.json").write_text(json.dumps(data))
    try:
        plan = load_plan(place)
        files = nccl_files(plan, place)
    except TcclError as error:
        assert "\n" not in str(error)
        return
    assert len(plan.channel_rings) == plan.settings.channels
    assert all(".." not in name and "\x00" not in text for name, text in files.items())
    result = tccl("show", str(place), "--hops")
    assert result.exit_code == 0, result.exception


def test_settings_that_only_leave_nics_out_are_fine():
    chains = dict.fromkeys("ab", ((1, (0, 1, 2, 3), 1),))
    wanted = Settings(ib_hca=("mlx5_1",), **LOCAL)
    plan = cluster_plan([("a", FOUR), ("b", FOUR)], chains, settings=wanted)
    assert check_plan(plan, where="plan") is plan
