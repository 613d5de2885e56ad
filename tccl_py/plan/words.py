"""GPU lists, ring orders, settings and provenance in words, and a plan as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tccl_py.files import picked
from tccl_py.nccl.settings import Settings, environment
from tccl_py.plan.files import graph_files
from tccl_py.plan.plan import ChoiceName, Plan, PlanChoice, SubsetRings
from tccl_py.readers.hosts import compress

CHOICE_WORDS: dict[ChoiceName, str] = {
    "default": "default NCCL",
    "variables": "variables only",
    "graph": "graph file",
}


def mark(*, simulated: bool, assumed: bool) -> str:
    """Return the mark beside every block of rates.

    >>> mark(simulated=True, assumed=True)
    'simulated from assumed figures'
    """
    if not simulated:
        return "measured"
    return "simulated from assumed figures" if assumed else "simulated"


def gpu_list(gpus: Sequence[int]) -> str:
    """Return GPU indices as `tccl env --gpus` takes them.

    >>> gpu_list((0, 1, 2, 5))
    '0-2,5'
    """
    return compress(map(str, gpus)).strip("[]")


def plan_name(plan: Plan) -> str:
    """Return the machine of a plan, or the number of hosts with the machine of each class."""
    machines = ", ".join(part.machine.name for part in plan.cluster.classes)
    return f"{len(plan.hosts)} hosts of {machines}" if plan.is_cluster else machines


def order_words(ring: Sequence[int]) -> str:
    """Return a ring's GPUs, back to the first: 0 → 2 → 1 → 0."""
    return " → ".join(str(gpu) for gpu in (*ring, ring[0]))


def settings_words(settings: Settings) -> str:
    """Return settings in one line: variables, then channels.

    >>> settings_words(Settings(p2p_level="SYS", channels=2))
    'NCCL_P2P_LEVEL=SYS, 2 channels'
    """
    variables = [f"{name}={value}" for name, value in environment(settings).items()]
    channels = f"{settings.channels} channel{'' if settings.channels == 1 else 's'}"
    return ", ".join([*(variables or ["default settings"]), channels])


def choice_words(name: ChoiceName, settings: Settings) -> str:
    """Return a choice in one line: its variables, and the channels of a graph file.

    >>> choice_words("variables", Settings(p2p_level="SYS", channels=2))
    'variables only, NCCL_P2P_LEVEL=SYS'
    """
    words = {
        "default": (),
        "variables": settings_words(settings).split(", ")[:-1],
        "graph": (settings_words(settings),),
    }
    return ", ".join([CHOICE_WORDS[name], *words[name]])


def subset_files(plan: Plan) -> Iterator[tuple[tuple[int, ...], str, SubsetRings]]:
    """Yield sets of GPUs whose communicators get a graph file by the plugin, and their rings."""
    for gpus, name in graph_files(plan).items():
        rings = plan.subset(gpus)
        if rings is not None:
            yield gpus, name, rings


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the JSON of `plan --json` and `show --json`; a cluster's rings are of global ranks."""
    if plan.is_cluster:
        subject: dict[str, Any] = {"kind": "cluster", "hosts": plan.host_order, "bounded": False}
        limit = {"whole_ring_gbps": plan.whole_ring_gbps}
    else:
        subject = {"machine": plan.machine.name, "gpus": plan.gpus}
        subject["communicators"] = [
            {"gpus": gpus, "graph_file": f"nccl/{name}"} | picked(found, "rings", "rate_gbps")
            for gpus, name, found in subset_files(plan)
        ]
        limit = {"limit_gbps": plan.limit_gbps}
    return {
        **subject,
        "rings": plan.channel_rings,
        **picked(plan, "rate_gbps", "bound_gbps"),
        **limit,
        **picked(plan, "proven", "sets_measured", "simulated", "assumed"),
        **_settings_json(plan.settings),
        "kept": plan.pinned_env,
        "recommended": plan.recommended,
        "choices": {name: choice_json(choice) for name, choice in plan.choices.items()},
        "stock": choice_json(plan.stock),
        **picked(plan, "cancelled", "notices"),
    }


def choice_json(choice: PlanChoice) -> dict[str, Any]:
    """Return the JSON of one way to run NCCL."""
    more = picked(choice, "rings", "achieved_gbps", "note")
    return {"rate_gbps": choice.rate_gbps, **_settings_json(choice.settings), **more}


def _settings_json(settings: Settings) -> dict[str, Any]:
    return {"settings": msgspec.to_builtins(settings), "environment": environment(settings)}
