"""Versions, settings and the environment that makes them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.model.machine import Knowledge
from tccl_py.nccl.settings import Settings, check_settings, environment, settings_from_environment
from tccl_py.nccl.transport import (
    candidates,
    expressible,
    final_channels,
    hop_space,
    searched_settings,
    values_of,
)
from tccl_py.nccl.variables import given_variables, list_unfollowed, notices, similar_name
from tccl_py.nccl.versions import asked_version, known_versions, version_facts
from tccl_py.nccl.view import view
from tests.nccl_cases import machine
from tests.toy import toy_machine

NETWORK = {
    "net_gdr_level": "PHB",
    "net_gdr_read": True,
    "cross_nic": 1,
    "ib_hca": ("mlx5_0:1", "mlx5_1"),
    "ib_gid_index": 3,
    "socket_ifname": ("eth0", "bond0.12"),
}


def test_default_settings_need_no_variable():
    assert environment(Settings()) == {}


@pytest.mark.parametrize("version", known_versions())
def test_every_expressible_setting_comes_back_from_its_environment(version):
    for settings in expressible(version):
        assert settings_from_environment(environment(settings), version=version) == settings


def test_level_loc_is_written_as_p2p_disable():
    assert environment(Settings(p2p_level="LOC")) == {"NCCL_P2P_DISABLE": "1"}


def test_settings_of_the_network_are_written_as_exact_names_and_come_back():
    written = environment(Settings(**NETWORK))
    assert written == {
        "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_NET_GDR_READ": "1",
        "NCCL_CROSS_NIC": "1",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_SOCKET_IFNAME": "=eth0,bond0.12",
    }
    assert settings_from_environment(written) == Settings(**NETWORK)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"ib_hca": ("mlx5_0", "mlx5 1")}, "$.ib_hca"),
        ({"ib_hca": ("a,b",)}, "$.ib_hca"),
        ({"ib_hca": ("^mlx5_0",)}, "$.ib_hca"),
        ({"ib_hca": ("mlx5_0:0",)}, "$.ib_hca"),
        ({"ib_hca": tuple(f"mlx5_{n}" for n in range(33))}, "$.ib_hca"),
        ({"socket_ifname": ("$(id)",)}, "$.socket_ifname"),
        ({"socket_ifname": ("eth0\nNCCL_DEBUG=INFO",)}, "$.socket_ifname"),
        ({"socket_ifname": ("",)}, "$.socket_ifname"),
        ({"ib_gid_index": -1}, "$.ib_gid_index"),
        ({"version": "2.18", "net_gdr_level": "P2C"}, "net_gdr_level is P2C"),
    ],
)
def test_names_and_numbers_that_would_mean_something_else_are_refused(change, what):
    with pytest.raises(InputError) as error:
        environment(Settings(**change))
    assert error.value.where.startswith(f"settings for NCCL {change.get('version', '2.30')}")
    assert what in error.value.what


@pytest.mark.parametrize("text", ["mlx5_0", "^=mlx5_0", "^mlx5", "=mlx5_0,a b", "", "="])
def test_lists_of_nics_that_do_not_name_them_exactly_count_as_unset(text):
    assert settings_from_environment({"NCCL_IB_HCA": text}).ib_hca == ()


def test_settings_of_older_plans_are_read_with_nccls_own_network():
    old = b'{"version": "2.30", "p2p_level": "SYS", "channels": 4}'
    assert msgspec.json.decode(old, type=Settings) == Settings(p2p_level="SYS", channels=4)


@pytest.mark.parametrize(("threads", "sockets"), [(1, 1), (4, 2), (16, 4), (1, 64), (None, 8)])
def test_socket_threads_come_back_from_their_environment(threads, sockets):
    settings = Settings(socket_threads=threads, sockets_per_thread=sockets)
    assert settings_from_environment(environment(settings)) == settings


@pytest.mark.parametrize(("threads", "sockets"), [(17, 1), (16, 5), (0, -1), (-1, 1)])
def test_more_sockets_than_nccl_takes_are_refused(threads, sockets):
    with pytest.raises(InputError, match="socket"):
        environment(Settings(socket_threads=threads, sockets_per_thread=sockets))


def test_old_level_numbers_mean_what_they_meant():
    levels = [settings_from_environment({"NCCL_P2P_LEVEL": str(n)}).p2p_level for n in range(7)]
    assert levels == ["LOC", "PIX", "PXB", "PHB", "SYS", "SYS", "SYS"]


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("NCCL_P2P_LEVEL", "BANANA", "p2p_level", None),
        ("NCCL_P2P_LEVEL", "sys", "p2p_level", None),
        ("NCCL_P2P_LEVEL", "-1", "p2p_level", None),
        ("NCCL_P2P_LEVEL", "2x", "p2p_level", "PXB"),
        ("NCCL_P2P_DISABLE", "0x1", "p2p_level", "LOC"),
        ("NCCL_CROSS_NIC", "two", "cross_nic", 0),
        ("NCCL_CROSS_NIC", "", "cross_nic", None),
        ("NCCL_P2P_READ_ENABLE", "yes", "p2p_read", False),
        ("NCCL_BUFFSIZE", "0x10000", "buffsize", 65536),
        ("NCCL_BUFFSIZE", "0200000", "buffsize", 65536),
        ("NCCL_MIN_NCHANNELS", "9" * 5000, "min_channels", None),
    ],
)
def test_values_are_read_as_nccl_reads_them(name, text, field, value):
    assert getattr(settings_from_environment({name: text}), field) == value


@pytest.mark.parametrize(
    ("variables", "limits"),
    [
        ({"MIN_NRINGS": "4", "MAX_NRINGS": "8"}, (4, 8)),
        ({"MIN_NRINGS": "4", "MIN_NCHANNELS": "6"}, (6, None)),
        ({"MIN_CTAS": "4", "MIN_NCHANNELS": "6"}, (6, None)),
        ({"MAX_CTAS": "4", "MAX_NCHANNELS": "6", "MIN_CTAS": "9"}, (4, 4)),
        ({"MAX_CTAS": "0", "MIN_CTAS": "-1"}, (None, None)),
        ({"MIN_CTAS": "1000"}, (64, None)),
    ],
)
def test_every_variable_that_limits_channels_counts(variables, limits):
    found = settings_from_environment({f"NCCL_{name}": text for name, text in variables.items()})
    assert (found.min_channels, found.max_channels) == limits


def test_the_settings_variables_are_among_those_of_nccl():
    whole = Settings(version="2.28", p2p_level="SYS", p2p_read=True, shm_disable=True, **NETWORK)
    names = environment(whole)
    assert [name for name in names if similar_name(name)] == []
    assert list(notices(names)) == []


def test_misspelt_names_and_values_are_told():
    for name in ("NCCL_P2P_LEVLE", "NCCL_P2P_LEVL", "nccl_p2p_level", "NCLL_P2P_LEVEL"):
        with pytest.raises(InputError) as error:
            given_variables([f"{name}=SYS"])
        assert error.value.right == "write NCCL_P2P_LEVEL"
    given = given_variables(
        ["NCCL_P2P_LEVEL=BANANA", "NCCL_CROSS_NIC=1 ", "NCCL_NVLS_ENABLE=off", "A=b", "NCCL_ALGO=x"]
    )
    level, switch, other = notices(given)
    assert "ignores NCCL_P2P_LEVEL=BANANA" in level and "SYS" in level
    assert "NCCL_NVLS_ENABLE=off as 0" in switch
    (missed,) = list_unfollowed(
        {"NCCL_PXN_DISABLE": "1", "NCCL_DEBUG": "INFO", "NCCL_IB_MERGE_NICS": "0"}
    )
    assert "NCCL_PXN_DISABLE" in missed
    assert other.endswith("no variable A")


def test_copy_engine_bounces_are_gone_in_2_30():
    settings = Settings(version="2.30", shm_copy_engine="both")
    with pytest.raises(InputError) as error:
        environment(settings)
    assert error.value.where == "settings for NCCL 2.30"
    assert "shm_copy_engine" in error.value.right
    assert environment(Settings(version="2.28", shm_copy_engine="both")) == {
        "NCCL_SHM_USE_CUDA_MEMCPY": "1",
        "NCCL_SHM_MEMCPY_MODE": "3",
    }


def test_a_version_nobody_checked_has_the_nearest_ones_facts_and_says_so():
    facts = version_facts("2.20.5")
    assert (facts.name, facts.verified, facts.max_channels) == ("2.18", False, 16)
    assert version_facts("2.30.7+cuda13.0").verified


@pytest.mark.parametrize("text", ["", "two", "2", "2.x", "9" * 80, "2.18 2.28", "2.28.9.1.2"])
def test_what_is_no_version_is_refused(text):
    with pytest.raises(InputError, match="is no version"):
        version_facts(text)


@pytest.mark.parametrize("text", ["v2.28.9", "2.28.9-1", "2.028.9+cuda13.0"])
def test_a_version_that_a_user_names_is_kept_as_its_numbers(text):
    assert asked_version(text) == "2.28.9"


@pytest.mark.parametrize("text", ["2.17.1", "2.99", "3.0"])
def test_versions_without_rules_cannot_be_asked_for(text):
    assert asked_version("2.39.1") == "2.39.1"
    with pytest.raises(InputError, match="has no rules"):
        asked_version(text)


@given(
    st.dictionaries(
        st.sampled_from(
            sorted(
                environment(
                    Settings(
                        version="2.28",
                        p2p_level="SYS",
                        p2p_read=True,
                        p2p_copy_engine=True,
                        shm_locality="sender",
                        shm_copy_engine="both",
                        net_disable_intra=True,
                        buffsize=1024,
                        algo="Ring",
                        **NETWORK,
                    )
                )
            )
        ),
        st.text(max_size=12),
    )
)
def test_any_environment_gives_settings(variables):
    assert isinstance(settings_from_environment(variables, version="2.28"), Settings)


@pytest.mark.parametrize(
    ("channels", "options", "final"),
    [
        (1, {}, 2),
        (8, {"sm": 90}, 16),
        (4, {"sm": 90, "nodes": 2, "speed_intra": 50.0}, 16),
        (4, {"sm": 90, "nodes": 2, "speed_intra": 45.0}, 8),
        (4, {"sm": 80, "nodes": 2, "speed_intra": 50.0}, 8),
        (8, {"sm": 90, "nodes": 2, "speed_intra": 50.0}, 16),
        (32, {}, 64),
        (8, {"max_channels": 3}, 3),
        (1, {"min_channels": 8}, 8),
    ],
)
def test_channels_are_doubled_then_clipped_or_filled(channels, options, final):
    ends = {name: options.pop(name) for name in options.keys() & {"min_channels", "max_channels"}}
    settings = Settings(channels=channels, **ends)
    assert final_channels(settings, **{"sm": 70, **options}) == final


def test_candidates_differ_in_the_hops_they_give():
    h200 = machine("h200x4-vm.xml")
    found = candidates(h200, Knowledge(), "2.30", channels=4)
    spaces = [str(list(hop_space(view(h200, Knowledge(), settings)))) for settings in found]
    assert len(set(spaces)) == len(spaces) == 4  # write, copy engine, read, bounce


def test_candidates_contain_the_choice_that_gained_most_on_four_h200():
    found = candidates(machine("h200x4-vm.xml"), Knowledge(), "2.28", channels=8)
    assert Settings(version="2.28", p2p_level="LOC", channels=8) in found
    assert 512 * 1024 in values_of("buffsize", "rings") and 8 in values_of("channels", "rings")


@pytest.mark.parametrize("row", searched_settings())
def test_every_searched_value_is_one_of_its_setting(row):
    for changes in row.changes:
        for setting, value in changes.items():
            check_settings(msgspec.convert({setting: value, "version": "2.28"}, Settings))


def test_levels_that_make_no_difference_are_not_tried_twice():
    one_socket = toy_machine(gpus=4)
    levels = {settings.p2p_level for settings in candidates(one_socket, Knowledge(), "2.30")}
    assert levels == {None, "SYS"}
