"""Settings: one process-wide choice for NCCL, and the environment variables of the choice.

Source of names of NICs: ncclIbInitDevices (transport/net_ib), ncclFindInterfaces (misc/socket.cc)
and parseStringList (misc/utils.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from tccl_py.errors import require
from tccl_py.files import check_path, check_types
from tccl_py.model.transfer import DEFAULT_FIFO_BYTES, MAX_FIFO_BYTES, Side
from tccl_py.nccl.c_numbers import c_integer
from tccl_py.nccl.versions import ASSUMED, LEVELS, Level, version_facts

CopyEngineSide = Literal["sender", "receiver", "both"]
CrossNic = Literal[0, 1, 2]

GRAPH_VARIABLE = "NCCL_GRAPH_FILE"
_ENDS = ("MIN", "MAX")
_SHM_MODE = "NCCL_SHM_MEMCPY_MODE"
_SHM_MODES: dict[int, CopyEngineSide] = {1: "sender", 2: "receiver", 3: "both"}
_OLD_LEVELS: tuple[Level, ...] = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
"""Meaning of NCCL_P2P_LEVEL=0, 1, ... before levels had names; larger numbers are SYS."""
UNSET = -2
"""NCCL's own value of a variable that is not set."""
MAX_GID_INDEX = 255
_MAX_SOCKET_THREADS, _MAX_SOCKETS = 16, 64
"""NCCL's MAX_THREADS and MAX_SOCKETS of one connection (net_socket.cc)."""
# Names of RDMA devices and interfaces that no list of NCCL's, no shell and no nccl.conf misreads,
# as many as NCCL's MAX_IB_DEVS and MAX_IFS; NCCL drops longer lists' ends.
_Hca = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}(:[1-9][0-9]{0,2})?\Z")]
_Hcas = Annotated[tuple[_Hca, ...], Meta(max_length=32)]
_Interface = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}\Z")]
_Interfaces = Annotated[tuple[_Interface, ...], Meta(max_length=16)]
_Count = Annotated[int, Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one NCCL process; None is NCCL's own default."""

    version: str = ASSUMED
    p2p_level: Level | None = None
    """The farthest path of P2P; LOC lets no pair talk directly."""
    p2p_read: bool | None = None
    """Whether the receiver reads; None reads on NVLink between two sm 80 GPUs and writes
    elsewhere."""
    p2p_copy_engine: bool = False
    shm_locality: Side = "receiver"
    shm_copy_engine: CopyEngineSide | None = None
    shm_disable: bool = False
    """Whether pairs without P2P go over NICs; no plan chooses it."""
    shm_placement: bool = False
    """Whether the NCCL plugin chooses the NUMA node of each rank's bounce buffers, which are then
    the sender's."""
    net_disable_intra: bool = False
    channels: _Count = 1
    """Ring channels of a graph file. The final number is more (`final_channels`), within the two
    below."""
    min_channels: _Count | None = None
    max_channels: _Count | None = None
    buffsize: Annotated[int, Meta(ge=1024, le=MAX_FIFO_BYTES)] = DEFAULT_FIFO_BYTES
    """A channel's FIFO in bytes."""
    algo: Literal["Ring"] | None = None
    net_gdr_level: Level | None = None
    """The farthest path over which NICs reach GPU memory; LOC is never."""
    net_gdr_read: bool | None = None
    """Whether they do when sending; None is not below sm 80 without NVLink."""
    cross_nic: CrossNic | None = None
    """0 keeps a ring on one rail, 1 lets it change rails, 2 (NCCL's default) where that helps."""
    ib_hca: _Hcas = ()
    """NICs by exact names, with or without a port (`mlx5_0:1`); () is all."""
    ib_gid_index: Annotated[int, Meta(ge=0, le=MAX_GID_INDEX)] | None = None
    socket_ifname: _Interfaces = ()
    """Interfaces by exact names; () is all."""
    socket_threads: Annotated[int, Meta(ge=1, le=_MAX_SOCKET_THREADS)] | None = None
    """Helper threads of a connection over sockets."""
    sockets_per_thread: Annotated[int, Meta(ge=1, le=_MAX_SOCKETS)] | None = None
    """Sockets of each of them."""
    subnet_routing: bool = False
    """Whether a connection takes NICs of one subnet, a side's own where the other's does not reach
    it; NICs are then not merged."""
    subnet_prefix: Annotated[int, Meta(ge=1, le=32)] | None = None
    """The first bits of addresses that make a subnet."""


_DEFAULTS = Settings()
_FIELD_TYPES = get_type_hints(Settings, include_extras=True)


def check_settings(settings: Settings) -> Settings:
    """Return `settings` if their version of NCCL can follow them."""
    facts, where = version_facts(settings.version), f"settings for NCCL {settings.version}"
    check_types(settings, where=where)
    copies = facts.shm_copy_engine or settings.shm_copy_engine is None
    right = "leave shm_copy_engine out, or use NCCL 2.28"
    require(copies, where, "bounces cannot use a copy engine", right)
    placed = not settings.shm_placement or settings.shm_locality == "sender"
    right = "the plugin places what the sender allocates: set shm_locality to sender"
    require(placed, where, "shm_placement is true", right)
    routes = facts.routes_by_subnet or not settings.subnet_routing
    require(routes, where, "connections cannot follow subnets", "NCCL 2.30.7 is the first that can")
    most = facts.max_channels
    fault = f"channels is {settings.channels}"
    require(settings.channels <= most, where, fault, f"1 to {most}")
    most = facts.max_final_channels
    low, high = settings.min_channels or 1, settings.max_channels or most
    fault = f"channels are to be {low} to {high} in the end"
    require(low <= high <= most, where, fault, f"1 to {most}")
    for name in ("p2p_level", "net_gdr_level"):
        level = getattr(settings, name)
        is_known = level not in facts.unknown_levels
        require(is_known, where, f"{name} is {level}", "this version takes it for LOC")
    threads, sockets = settings.socket_threads or 1, settings.sockets_per_thread or 1
    fault = f"a connection has {threads} socket threads with {sockets} sockets each"
    right = f"at most {_MAX_SOCKETS} sockets together"
    require(threads * sockets <= _MAX_SOCKETS, where, fault, right)
    return settings


def integer(text: str | None) -> int:
    """Return a variable as NCCL reads numbers: 0 for other text, UNSET for none or too large."""
    number, _ = c_integer(text or str(UNSET))
    return number if -(2**63) <= number < 2**63 else UNSET


# The variables of settings: how each value is read and written.


def _at_one(value: object) -> Callable[[str, int], object]:
    return lambda _, number: value if number == 1 else None


def _level(text: str, number: int) -> object:
    old = _OLD_LEVELS[min(number, len(_OLD_LEVELS) - 1)] if "0" <= text[:1] <= "9" else None
    return text if text in LEVELS else old


def _exact_names(text: str, _: int) -> object:
    return tuple(filter(None, text[1:].split(","))) if text.startswith("=") else None


class _Variable(NamedTuple):
    """A variable of NCCL: the value that its text and number have (None: unset), else its number.

    `own` is NCCL's own value of a setting that always changes a ring's transfers ("": it depends
    on the machine). Settings without it count only if a plan chose them.
    """

    name: str
    read: Callable[[str, int], object] = lambda _, number: number
    own: str | None = None


_VARIABLES = {
    "p2p_level": _Variable("NCCL_P2P_LEVEL", _level, ""),
    "p2p_read": _Variable("NCCL_P2P_READ_ENABLE", lambda _, n: None if n == UNSET else n != 0, ""),
    "p2p_copy_engine": _Variable("NCCL_P2P_USE_CUDA_MEMCPY", _at_one(True), "0"),
    "shm_locality": _Variable("NCCL_SHM_LOCALITY", _at_one("sender"), "2"),
    "shm_copy_engine": _Variable("NCCL_SHM_USE_CUDA_MEMCPY", _at_one("sender"), "0"),
    "shm_disable": _Variable("NCCL_SHM_DISABLE", _at_one(True), "0"),
    "shm_placement": _Variable("NCCL_CUMEM_HOST_ENABLE", lambda _, n: True if n == 0 else None),
    "net_disable_intra": _Variable("NCCL_NET_DISABLE_INTRA", _at_one(True), "0"),
    "min_channels": _Variable("NCCL_MIN_NCHANNELS"),
    "max_channels": _Variable("NCCL_MAX_NCHANNELS", lambda _, n: None if n == UNSET else max(1, n)),
    "buffsize": _Variable("NCCL_BUFFSIZE", own=str(_DEFAULTS.buffsize)),
    "algo": _Variable("NCCL_ALGO", lambda text, _: "Ring" if text.lower() == "ring" else None),
    "net_gdr_level": _Variable("NCCL_NET_GDR_LEVEL", _level),
    "net_gdr_read": _Variable("NCCL_NET_GDR_READ", lambda _, n: None if n < 0 else n != 0),
    "cross_nic": _Variable("NCCL_CROSS_NIC"),
    "ib_hca": _Variable("NCCL_IB_HCA", _exact_names),
    "ib_gid_index": _Variable("NCCL_IB_GID_INDEX"),
    "socket_ifname": _Variable("NCCL_SOCKET_IFNAME", _exact_names),
    "socket_threads": _Variable("NCCL_SOCKET_NTHREADS"),
    "sockets_per_thread": _Variable("NCCL_NSOCKS_PERTHREAD"),
    "subnet_routing": _Variable(
        "NCCL_IB_SUBNET_AWARE_ROUTING", lambda _, n: None if n == UNSET else n != 0
    ),
    "subnet_prefix": _Variable("NCCL_IB_SUBNET_PREFIX_LEN"),
}
"""The variable of each setting; a level LOC is written as NCCL_P2P_DISABLE."""
_SWITCHES = {"shm_locality": "1", "shm_placement": "0"}
"""Texts of switches that do not read as the value."""


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables that differ from NCCL's defaults, without the graph file.

    Names of NICs stand behind `=`: without it NCCL takes mlx5_1 for mlx5_10 too.

    >>> environment(Settings(p2p_level="LOC", buffsize=524288))
    {'NCCL_P2P_DISABLE': '1', 'NCCL_BUFFSIZE': '524288'}
    """
    check_settings(settings)
    variables: dict[str, str] = {}
    for field, (name, *_) in _VARIABLES.items():
        value = getattr(settings, field)
        if value == getattr(_DEFAULTS, field):
            continue
        if (field, value) == ("p2p_level", "LOC"):
            variables["NCCL_P2P_DISABLE"] = "1"
        elif field in _SWITCHES:
            variables[name] = _SWITCHES[field]
        elif field == "shm_copy_engine":
            mode = next(code for code, side in _SHM_MODES.items() if side == value)
            variables |= {name: "1", _SHM_MODE: str(mode)}
        elif field == "subnet_routing":
            # A merged NIC would have ports in several subnets.
            variables |= {name: "1", "NCCL_IB_MERGE_NICS": "0"}
        elif isinstance(value, tuple):
            variables[name] = f"={','.join(value)}"
        else:
            variables[name] = value if isinstance(value, str) else str(int(value))
    return variables


def environment_text(settings: Settings) -> str:
    """Return the variables that make these settings as `NAME=VALUE ...`, "" for none."""
    return shell_text(environment(settings))


def settings_from_environment(
    variables: Mapping[str, str], *, version: str = ASSUMED, channels: int = 1
) -> Settings:
    """Return the settings that NCCL reads from variables; values without meaning count as unset.

    Lists of NICs or interfaces count only with exact names (`=mlx5_0,mlx5_1`): prefixes and
    exclusions depend on the host.
    """
    facts = version_facts(version)
    fields: dict[str, Any] = {}
    # Names of NCCL before 2.5.
    older = {f"NCCL_{end}_NCHANNELS": variables.get(f"NCCL_{end}_NRINGS") for end in _ENDS}
    variables = {name: text for name, text in older.items() if text} | dict(variables)
    for field, (name, read, _) in _VARIABLES.items():
        text = variables.get(name)
        value = None if text is None else read(text, integer(text))
        with suppress(msgspec.ValidationError):
            if value is not None:
                fields[field] = msgspec.convert(value, _FIELD_TYPES[field])
    if integer(variables.get("NCCL_P2P_DISABLE")) == 1:
        fields["p2p_level"] = "LOC"
    if "shm_copy_engine" in fields:
        mode = _SHM_MODES.get(integer(variables.get(_SHM_MODE)), "sender")
        fields["shm_copy_engine"] = mode if facts.shm_copy_engine else None
    if "shm_locality" not in fields:
        fields.pop("shm_placement", None)
    least, most = (integer(variables.get(f"NCCL_{end}_CTAS")) for end in _ENDS)
    if most > 0:
        fields["max_channels"] = min(most, fields.get("max_channels", most))
    if least > 0:
        least = min(least, most) if most > 0 else least
        fields["min_channels"] = max(least, fields.get("min_channels", least))
    for end in fields.keys() & {"min_channels", "max_channels"}:
        fields[end] = min(fields[end], facts.max_final_channels)
    if fields.get("sockets_per_thread", 0) * fields.get("socket_threads", 1) > _MAX_SOCKETS:
        del fields["sockets_per_thread"]
    return Settings(version=version, channels=channels, **fields)


# Texts of files: nccl.conf for a host, env.sh for a shell.


def job_environment(settings: Settings, *, graph: PurePosixPath | None = None) -> dict[str, str]:
    """Return all variables of a job: the settings', and NCCL_GRAPH_FILE if given."""
    variables = environment(settings)
    if graph is not None:
        check_path(graph)
        right = "jobs start in other directories: give a path from the root"
        where = f"graph file '{graph}'"
        require(graph.is_absolute(), where, "is no absolute path", right)
        variables[GRAPH_VARIABLE] = str(graph)
    return variables


def nccl_conf(settings: Settings) -> str:
    """Return the text of an nccl.conf: NAME=value lines, which NCCL takes literally."""
    return "".join(f"{name}={value}\n" for name, value in environment(settings).items())


def env_sh(settings: Settings, *, graph: PurePosixPath | None = None) -> str:
    """Return the text of a script to source: one quoted export a line."""
    return export_lines(job_environment(settings, graph=graph))


def export_lines(variables: Mapping[str, str]) -> str:
    """Return `export NAME=value` lines, quoted for any shell."""
    return "".join(f"export {word}\n" for word in shell_words(variables))


def shell_words(variables: Mapping[str, str]) -> list[str]:
    """Return `NAME=value` for each variable, quoted for any shell: zsh expands a leading `=mlx5_0`.

    >>> print(*shell_words({"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_CROSS_NIC": "1"}))
    NCCL_IB_HCA='=mlx5_0:1' NCCL_CROSS_NIC=1
    """
    plain = {name: shlex.quote(value) for name, value in variables.items()}
    quoted = {n: f"'{v}'" if v == variables[n] and "=" in v else v for n, v in plain.items()}
    return [f"{name}={value}" for name, value in quoted.items()]


def shell_text(variables: Mapping[str, str]) -> str:
    """Return variables as `NAME=VALUE ...`, quoted for any shell."""
    return " ".join(shell_words(variables))


# The pinned environment of a plan (variables of all its jobs), and conflicts with settings.


_RIGHT = {
    "NCCL_P2P_DISABLE": "1 would; leave it out otherwise",
    "NCCL_P2P_LEVEL": "a path type would, as SYS, PHB, PIX or LOC; leave it out otherwise",
    "NCCL_IB_HCA": "exact names would, as =mlx5_0:1,mlx5_1:1",
}
PINNABLE = tuple(_RIGHT)


def check_pinnable(name: str, *, where: str) -> None:
    """Check that plans can be made under a variable."""
    fault, right = "is no variable that plans can be made under", " or ".join(PINNABLE)
    require(name in PINNABLE, f"{where} {name[:40]!r}", fault, right)


def pinned_values(variables: Mapping[str, str], *, where: str) -> dict[str, str]:
    """Return the variables with the values that NCCL reads; each must set a P2P level or NICs.

    >>> pinned_values({"NCCL_P2P_LEVEL": "1"}, where="`pin_env`")
    {'NCCL_P2P_LEVEL': 'PIX'}
    """
    values = {}
    for name, value in sorted(variables.items()):
        check_pinnable(name, where=where)
        read, fault = settings_from_environment({name: value}), f"is {value[:20]!r}"
        said = read.p2p_level or f"={','.join(read.ib_hca)}" * bool(read.ib_hca)
        require(said, f"{where} {name}", f"{fault}, which pins nothing", _RIGHT[name])
        values[name] = "1" if name == "NCCL_P2P_DISABLE" else str(said)
    return values


def pinned_level(variables: Mapping[str, str]) -> Level | None:
    """Return the P2P level of these variables (LOC: no P2P); None is NCCL's default."""
    return settings_from_environment(variables).p2p_level


def check_pinned_env(pinned: Mapping[str, str], under: Iterable[Settings], where: str) -> None:
    """Check a plan's pinned environment against the plan's settings."""
    place, read = f"{where} pinned_env", settings_from_environment(pinned)
    is_read_so = pinned_values(pinned, where=place) == pinned
    require(is_read_so, place, "has values that no plan has", "plan it again")
    for settings in under if pinned else ():
        for field in ("p2p_level", "ib_hca"):
            value, right = getattr(settings, field), getattr(read, field)
            fits = value == right or not right
            fault = f"is for jobs with {shell_text(pinned)} and has {field} {value}"
            require(fits, where, fault, f"it is {right} there; plan it again")


def pinned_env_text(pinned: Mapping[str, str]) -> str:
    """Return the jobs that a plan is for.

    >>> pinned_env_text({"NCCL_P2P_DISABLE": "1"})
    'for jobs with NCCL_P2P_DISABLE=1, default NCCL included'
    """
    return f"for jobs with {shell_text(pinned)}, default NCCL included"


def env_conflicts(settings: Settings, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables in an environment that contradict these settings.

    >>> env_conflicts(Settings(p2p_level="SYS"), {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"})
    ('NCCL_P2P_DISABLE',)
    """
    required = environment(settings)
    if not _differ(settings, {**required, **variables}):
        return ()
    nccl = (name for name in sorted(variables) if name.startswith("NCCL_"))
    named = [name for name in nccl if _differ(settings, {**required, name: variables[name]})]
    return tuple(named) or ("its NCCL variables",)


def env_rules(settings: Settings) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the rules of `env_conflicts` as a table, a little stricter.

    Jobs that set a variable of the first part must give it this value, and must leave those of the
    second part alone.
    """
    checked = {name: value for name, _, value in _VARIABLES.values() if value is not None}
    if settings.p2p_level == "LOC":
        del checked["NCCL_P2P_LEVEL"]
    defaults = {name: value for name, value in checked.items() if value}
    must = {"NCCL_P2P_DISABLE": "0"} | defaults | environment(settings)
    return must, tuple(name for name in checked if name not in must)


def _differ(settings: Settings, variables: Mapping[str, str]) -> bool:
    read = settings_from_environment(
        variables, version=settings.version, channels=settings.channels
    )
    return any(
        getattr(read, field) != getattr(settings, field)
        for field, variable in _VARIABLES.items()
        if variable.own is not None or getattr(settings, field) != getattr(_DEFAULTS, field)
    )
