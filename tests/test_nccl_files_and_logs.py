"""nccl.conf, env.sh, and what NCCL's INFO log says."""

import shlex
import subprocess
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tccl_py.errors import InputError
from tccl_py.nccl.communicators import parse_log, same_rings, transport_of
from tccl_py.nccl.settings import Settings, env_sh, job_environment, nccl_conf
from tests.nccl_cases import CASES

SETTINGS = Settings(p2p_level="LOC", buffsize=512 * 1024, algo="Ring")
GRAPH = PurePosixPath("/etc/tccl/graph 1's.xml")


def test_nccl_conf_holds_one_variable_a_line():
    assert nccl_conf(SETTINGS) == ("NCCL_P2P_DISABLE=1\nNCCL_BUFFSIZE=524288\nNCCL_ALGO=Ring\n")


def test_a_shell_reads_back_what_env_sh_sets():
    text = env_sh(SETTINGS, graph=GRAPH) + 'printf %s "$NCCL_GRAPH_FILE"'
    result = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, check=True)
    assert result.stdout == str(GRAPH)


@given(st.text(min_size=1, max_size=30))
def test_no_path_escapes_its_line(name):
    graph = PurePosixPath("/" + name)
    try:
        lines = env_sh(Settings(), graph=graph)
    except InputError:
        return
    assert shlex.split(lines) == ["export", f"NCCL_GRAPH_FILE={graph}"]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("graph.xml", "graph file 'graph.xml': is no"),
        ("/a\nNCCL_DEBUG=INFO", "'/a\\nNCCL_DEBUG=INFO': has control characters"),
        ("/a\x7f", "'/a\\x7f': has control characters"),
        ("/a\x9b31m", "'/a\\x9b31m': has control characters"),
        ("/a\udcff", "'/a\\udcff': is not UTF-8"),
    ],
)
def test_paths_that_an_environment_cannot_name_as_they_are_are_refused(path, sentence):
    with pytest.raises(InputError) as error:
        job_environment(Settings(), graph=PurePosixPath(path))
    assert str(error.value).startswith(sentence)


NETWORK = Settings(
    net_gdr_level="PHB", cross_nic=1, ib_hca=("mlx5_0:1", "mlx5_2"), socket_ifname=("eth0.12",)
)


def test_the_network_is_written_as_nccl_and_a_shell_read_it():
    # NCCL takes a line up to its first = for the name; the second one asks for exact names.
    assert nccl_conf(NETWORK) == (
        "NCCL_NET_GDR_LEVEL=PHB\n"
        "NCCL_CROSS_NIC=1\n"
        "NCCL_IB_HCA==mlx5_0:1,mlx5_2\n"
        "NCCL_SOCKET_IFNAME==eth0.12\n"
    )
    text = env_sh(NETWORK) + 'printf "%s %s" "$NCCL_IB_HCA" "$NCCL_SOCKET_IFNAME"'
    result = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, check=True)
    assert result.stdout == "=mlx5_0:1,mlx5_2 =eth0.12"


@given(st.text(max_size=20))
def test_no_name_escapes_its_line(name):
    for settings in (Settings(ib_hca=(name,)), Settings(socket_ifname=(name,))):
        try:
            conf, script = nccl_conf(settings), env_sh(settings)
        except InputError:
            continue
        (line,) = conf.splitlines()
        assert line.split("=", 1)[1] == f"={name}"
        assert shlex.split(script) == ["export", line]


def test_default_settings_make_empty_files():
    assert (nccl_conf(Settings()), env_sh(Settings())) == ("", "")


def test_the_log_of_four_h200_shows_24_rings_over_p2p():
    text = (CASES / "h200x4-vm" / "nccl-2.28.9-init.log").read_text()
    log = parse_log(text, where="init.log")
    assert log.version == "2.28.9"
    assert log.communicators == (((0, 1, 2, 3),) * 24,)
    ring = {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert {(one.source, one.target) for one in log.connections} == ring
    assert {transport_of(one.via) for one in log.connections} == {"P2P"}
    assert len(log.connections) == 24 * 4


LINE = "vm:9:9 [0] NCCL INFO "


def test_bounces_networks_and_several_communicators_are_told_apart():
    text = "\n".join(
        LINE + rest
        for rest in (
            "Channel 00/02 : 0 2 1",
            "Channel 01/02 : 0 1 2",
            "Channel 00 : 0[0] -> 2[c1] via SHM/direct/direct",
            "Channel 00/0 : 2[2] -> 1[1] via SHM/direct/direct comm 0x1 nRanks 03",
            "Channel 01/0 : 1[1] -> 0[0] [receive] via NET/Socket/0",
            "Channel 00/01 : 0 1",
        )
    )
    log = parse_log(text, where="log")
    assert log.communicators == (((0, 2, 1), (0, 1, 2)), ((0, 1),))
    assert [(one.source, one.target, transport_of(one.via)) for one in log.connections] == [
        (0, 2, "SHM"),
        (2, 1, "SHM"),
        (1, 0, "NET"),
    ]


@pytest.mark.parametrize(
    ("line", "where", "what"),
    [("00/02 : 0 1", "log", "1 of 2"), ("01/02 : 0 1", "log:1", "channel 1 of 2")],
)
def test_a_log_that_lacks_channels_is_refused(line, where, what):
    with pytest.raises(InputError) as error:
        parse_log(f"{LINE}Channel {line}", where="log")
    assert error.value.where == where
    assert what in error.value.what


def test_rings_are_the_same_wherever_they_begin_but_not_backwards():
    assert same_rings((0, 2, 1, 3), (3, 0, 2, 1))
    assert not same_rings((0, 1, 2, 3), (0, 3, 2, 1))
    assert not same_rings((0, 1), (0, 1, 2))


def test_a_value_that_begins_with_an_equals_sign_is_quoted_for_zsh():
    # Without quotes zsh looks for a program called mlx5_0:1,mlx5_2.
    assert "export NCCL_IB_HCA='=mlx5_0:1,mlx5_2'\n" in env_sh(NETWORK)
    assert "export NCCL_CROSS_NIC=1\n" in env_sh(NETWORK)
