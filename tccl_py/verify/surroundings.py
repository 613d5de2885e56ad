"""The environment of a job's ranks: the caller's, without its NCCL settings, and one arm's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tccl_py.nccl.settings import HOST_VARIABLES

_OURS = ("NCCL_", "TORCH_NCCL_", "MASTER_", "TORCHELASTIC_")
_ALONE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""What a launcher says of another job."""
_LOGGED = "INIT,GRAPH,P2P,SHM,NET"


def job_surroundings(
    caller: Mapping[str, str],
    *,
    gpus: Sequence[int] | None,
    variables: Mapping[str, str],
    keep: Iterable[str] = (),
) -> dict[str, str]:
    """The environment of ranks over these GPUs (None: none, on the host) with `variables` set.

    Of the caller's NCCL variables those in HOST_VARIABLES and `keep` stay, where `variables` does
    not say otherwise. A user's own nccl.conf is not read; /etc/nccl.conf is.
    """
    kept = {*HOST_VARIABLES, *keep}
    found = {
        name: value
        for name, value in caller.items()
        if name in kept or not (name.startswith(_OURS) or name in _ALONE)
    }
    found["PYTHONWARNINGS"] = "ignore"
    if gpus is None:
        # What the host's name resolves to may be no interface of it.
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return {**found, **variables}
    found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    # NVML's order, which the plan's indices have.
    found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    found["NCCL_CONF_FILE"] = "/dev/null"
    # Graphs stand for calls of their own, for which NCCL registers no buffers.
    found["NCCL_GRAPH_REGISTER"] = "0"
    found["NCCL_DEBUG"] = "INFO"
    found["NCCL_DEBUG_SUBSYS"] = _LOGGED
    return {**found, **variables}


def kept_variables(caller: Mapping[str, str], keep: Iterable[str] = ()) -> dict[str, str]:
    """The caller's NCCL variables that jobs get, by name."""
    return {name: caller[name] for name in sorted({*HOST_VARIABLES, *keep}) if name in caller}
