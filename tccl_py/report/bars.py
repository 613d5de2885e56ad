"""The report's bars: what the plan gets beside what else is known, and the settings searched."""

from __future__ import annotations

import msgspec
from markupsafe import Markup

from tccl_py.plan.plan import ChoiceName, Plan, PlanChoice
from tccl_py.report.bar_chart import Bar, bar_chart
from tccl_py.report.contents import Contents
from tccl_py.report.words import CHOICE_WORDS, settings_words


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """Bars and the drawing of them."""

    bars: tuple[Bar, ...]
    figure: Markup


def rates_figure(contents: Contents) -> Bars:
    """What was predicted, is possible, and is got: those that are known."""
    bars = (*_predicted(contents.plan), *_achieved(contents))
    return _drawn("rates", "Rates of the plan", bars, contents.plan)


def _predicted(plan: Plan) -> list[Bar]:
    how = "when tuned" if plan.tuned else "predicted"
    bars = [Bar(label=f"{CHOICE_WORDS['graph']}, {how}", gbps=plan.rate_gbps, kind="plan")]
    if plan.bound_gbps is not None:
        bars.append(Bar(label="upper bound", gbps=plan.bound_gbps, kind="bound"))
    if plan.limit_gbps is not None:
        bars.append(Bar(label="bare copies over the same hops", gbps=plan.limit_gbps, kind="bound"))
    if plan.free is not None:
        rate = plan.free.rate_gbps
        bars.append(Bar(label="free choice of mechanism", gbps=rate, kind="free"))
    own: dict[ChoiceName, PlanChoice] = {"variables": plan.variables, "default": plan.stock}
    for name, choice in own.items():
        if choice.rate_gbps is not None:
            bars.append(
                Bar(label=f"{CHOICE_WORDS[name]}, {how}", gbps=choice.rate_gbps, kind="stock")
            )
    return bars


def _achieved(contents: Contents) -> list[Bar]:
    return [
        Bar(label=f"{CHOICE_WORDS[name]}, achieved", gbps=rate, kind="achieved")
        for name, rate in contents.achieved.items()
    ]


def settings_figure(plan: Plan) -> Bars | None:
    """The best ring set under each of the settings searched; None if they were not kept."""
    if not plan.alternatives:
        return None
    bars = tuple(
        Bar(
            label=settings_words(one.settings),
            gbps=one.rate_gbps,
            kind="plan" if one.settings == plan.settings else "stock",
            note=f"{one.rings_in_set} ring{'' if one.rings_in_set == 1 else 's'}",
        )
        for one in plan.alternatives
    )
    return _drawn("searched", "Best rate under each of the settings", bars, plan)


def _drawn(name: str, title: str, bars: tuple[Bar, ...], plan: Plan) -> Bars:
    listed = "; ".join(f"{bar.label}: {bar.gbps:.2f} GB/s" for bar in bars)
    marked = f"{title}, GB/s, {plan.provenance}"
    return Bars(bars=bars, figure=bar_chart(bars, name=name, title=marked, description=listed))
