"""A check as text for Prometheus: the node exporter's textfile collector takes it.

Source of the format: prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tccl_py.health.drift.check import Drift

Labels = Mapping[str, str]


def prometheus_text(drift: Drift, *, machine: str, simulated: bool, now: float) -> str:
    """All figures of a check; `now` is when it ended, in seconds since 1970."""
    own = {"machine": machine, "simulated": str(simulated).lower()}
    changed = {row.transfers for row in drift.changes} | drift.lost.keys()
    sets = {text: {**own, "set": text} for text in (*drift.sets, *drift.lost)}
    ratios = [(sets[text], row.ratio) for text, row in drift.sets.items()]
    return "".join(
        (
            _metric("drifted", "Whether rates differ from the plan's (1) or not (0).",
                    [(own, float(drift.drifted))]),
            _metric("sets_compared", "Transfer sets that were compared.",
                    [(own, float(len(drift.sets)))]),
            _metric("sets_lost", "Transfer sets that cannot be measured any more.",
                    [(own, float(len(drift.lost)))]),
            _metric("false_alarm_rate", "Chance of an alarm on an unchanged machine, at most.",
                    [(own, drift.false_alarm_rate)]),
            _metric("duration_seconds", "How long the check took.", [(own, drift.seconds)]),
            _metric("timestamp_seconds", "When the check ended, in seconds since 1970.",
                    [(own, now)]),
            _metric("set_rate_ratio", "Rate of the flow that fell most, now over then.", ratios),
            _metric("set_changed", "Whether the set changed beyond noise (1) or not (0).",
                    [(labels, float(text in changed)) for text, labels in sets.items()]),
        )
    )  # fmt: skip


def _metric(name: str, words: str, values: Iterable[tuple[Labels, float]]) -> str:
    lines = [f"tccl_check_{name}{_labels(labels)} {value:.10g}" for labels, value in values]
    if not lines:
        return ""
    head = f"# HELP tccl_check_{name} {words}\n# TYPE tccl_check_{name} gauge\n"
    return head + "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    """Labels with what the format has a meaning for escaped, and nothing a terminal acts on.

    >>> _labels({"machine": "box", "set": "G0->G0->G1"})
    '{machine="box",set="G0->G0->G1"}'
    """
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "".join(one if one.isprintable() else "?" for one in plain)
