"""Plans in words: GPU lists, orders, settings, lines and tables, JSON; what differs between two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tccl_py.errors import check_type, spell
from tccl_py.files import fill, pick, says
from tccl_py.model.cluster import compress
from tccl_py.nccl.settings import (
    Settings,
    environment,
    environment_text,
    pinned_env_text,
    shell_text,
    shell_words,
)
from tccl_py.nccl.versions import version_facts, why_no_plugin
from tccl_py.plan.chains import (
    AS_GOOD,
    Choice,
    ChoiceName,
    Failure,
    Order,
    SubsetRings,
    as_good,
)
from tccl_py.plan.directory import files_of, graph_files
from tccl_py.plan.plan import Plan

_MOST_RANKS = 32
CHOICE_WORDS: dict[ChoiceName, str] = {
    "default": "default NCCL",
    "large-buffers": "large buffers",
    "variables": "variables only",
    "graph": "graph file",
}


def has_stand_ins(plan: Plan) -> bool:
    """Return whether cores stand in for the machine's GPUs, without links."""
    return plan.dry_run and not plan.simulated


def plan_name(plan: Plan) -> str:
    """Return the machine of a plan, or the number of hosts with the machine of each class."""
    machines = ", ".join(dict.fromkeys(part.machine.name for part in plan.cluster.classes))
    return f"{len(plan.hosts)} hosts of {machines}" if len(plan.hosts) > 1 else machines


def planned_gpus(plan: Plan) -> str:
    """Return the name of a plan with the GPUs that are joined on each host."""
    gpus = dict.fromkeys(",".join(map(str, gpus)) for gpus in plan.class_gpus)
    return f"{plan_name(plan)}, GPUs {' or '.join(gpus)}"


def description(plan: Plan) -> str:
    """Return the plan in three lines: what it is for, the recommendation, and the slowest hop."""
    name, slowest = plan.bottleneck
    order = " ".join(map(str, plan.orders[0][:16])) + " ..." * (len(plan.orders[0]) > 16)
    count = f"{plan.ring_count} rings, the first" if plan.ring_count > 1 else "ring"
    return (
        f"Plan for {planned_gpus(plan)}: {plan.provenance}\n{advice(plan)}\n"
        f"{count} {order}: {plan.rate_gbps:.2f} GB/s, slowest {slowest.flow.words} on {name}"
    )


def advice(plan: Plan) -> str:
    """Return the recommendation, in a sentence or two; a dry run has none."""
    if plan.dry_run:
        return "DRY RUN: no advice, as no GPU was measured."
    return _advice(plan.as_shown)


def doctor_first(plan: Plan) -> str:
    """Return what comes before a model's advice to enable P2P, which may be granted and not work.

    "" where it enables none.
    """
    enables = plan.simulated and "NCCL_P2P_LEVEL" in environment(plan.job_settings)
    return "first `tccl doctor` on the machine, as P2P may not work" if enables else ""


def _advice(plan: Plan) -> str:
    name, gain = plan.recommended, plan.gain(plan.recommended)
    times = "" if gain is None else f": {gain:.2f}x default NCCL ({plan.basis_of_gain(name)})"
    if why := why_not_default(plan):
        times = f": {why}; {_rate_words(plan, name)}"
    if failure := plan.choices[name].fails:
        note = plan.choices["default"].note
        why = f", since {note}; `tccl doctor` says what to do" if note else ""
        return f"No choice runs: NCCL fails ({failure.verdict}){why}."
    variables = variables_words(plan.job_settings)
    early = not plan.at_bound and (plan.cancelled or plan.cut_short)
    ended = "was clearly faster before the search ended early"
    if name == "default":
        none = f". No variable or graph file {ended if early else 'is clearly faster'}."
        return f"Leave NCCL as it is{_say_offer(plan) or none}"
    if plan.is_by_variables:
        none = f". No graph file {ended if early else 'is needed'}."
        return f"Set {variables}{times}{_say_offer(plan) or none}"
    if plan.needs_plugin:
        by = "Load the NCCL plugin"
        if why_no_plugin(plan.settings.version):
            by = "Start each rank by `tccl run`"
        return f"{by}, which places bounce buffers on NUMA nodes{times}."
    if not variables:
        return f"Use the graph file{times}."
    return f"Use the graph file and set {variables}{times}."


def _say_offer(plan: Plan) -> str:
    """Return what would be faster for large all-reduces, where more than these decided; or ""."""
    base, rates = "default NCCL", plan.rates
    gains = {name: plan.gain(name) or 0.0 for name in plan.choices}
    if why_not_default(plan):
        base = environment_text(plan.choices[plan.control].settings)
        gains = {name: rate / rates[plan.control][0] for name, (rate, _) in rates.items()}
    note = plan.choices["variables"].note
    name = (
        "variables"
        if note and gains["variables"] > 1 + AS_GOOD
        else max(gains, key=lambda choice: gains[choice])
    )
    decided = plan.winner is None or plan.recommended != plan.control
    if decided or gains[name] <= 1 + AS_GOOD:
        return ""
    gain = f"{gains[name]:.2f}x {base} ({plan.basis_of_gain(name)})"
    if name == "variables" and note:
        variables = environment_text(plan.choices["variables"].settings)
        return f", or set {variables} where large messages decide: {gain}, but {note}."
    how = choice_words(name, plan.choices[name].settings)
    return f". For large all-reduces alone {gain} by {how}."


def p2p_note(plan: Plan) -> str:
    """Return what uses P2P although variables keep NCCL's transport from it; "" where none do."""
    control = plan.choices[plan.control].settings
    if control.p2p_level == plan.choices["default"].settings.p2p_level:
        return ""
    level = environment_text(Settings(version=control.version, p2p_level=control.p2p_level))
    by_windows = version_facts(control.version).windows_ask_cuda
    windows = ", registered windows by NCCL_WIN_ENABLE=0" * by_windows
    return (
        f"{level} is not all P2P: NVLS ends by NCCL_NVLS_ENABLE=0{windows}, kernels of vLLM and "
        "SGLang by --disable-custom-all-reduce; torch's symmetric memory, NVSHMEM and peer copies "
        "use the links too (docs/troubleshooting.md)"
    )


def notices(plan: Plan) -> tuple[str, ...]:
    """Return a plan's notices, with what comes before it, and what else uses bad links."""
    return (*filter(None, [doctor_first(plan)]), *plan.notices, *filter(None, [p2p_note(plan)]))


def variables_words(settings: Settings) -> str:
    """Return variables for a terminal, on which long lists of NICs are cut; `tccl env` has all."""
    words = shell_words(environment(settings))
    return " ".join(w if len(w) <= _MOST_WORD else f"{w.partition(',')[0]},...'" for w in words)


_MOST_WORD = 60
_VERBS = {"hangs": "hangs", "wrong values": "gives wrong values"}
"""What NCCL does that fails so."""


def why_not_default(plan: Plan) -> str:
    """Return how default NCCL fails, or that links leave it without a rate; "" for neither."""
    default = plan.choices["default"]
    since = f", since {default.note}" if default.note else ""
    if default.fails:
        verdict = default.fails.verdict
        return f"default NCCL {_VERBS.get(verdict, verdict)} here{since}"
    doubtful = default.rate_gbps is None and plan.control != "default" and not plan.cluster.cables
    return f"default NCCL is not rated{since}" if doubtful else ""


def _rate_words(plan: Plan, name: ChoiceName) -> str:
    choice = plan.choices[name]
    without = " without P2P" if choice.settings.p2p_level == "LOC" else ""
    return f"{choice.best_known_gbps or 0.0:.2f} GB/s{without} ({plan.basis_of_gain(name)})"


def settings_words(settings: Settings) -> str:
    """Return settings in one line: variables, then channels.

    >>> settings_words(Settings(p2p_level="SYS", channels=2))
    'NCCL_P2P_LEVEL=SYS, 2 channels'
    >>> print(settings_words(Settings(ib_hca=("mlx5_0:1",))))
    NCCL_IB_HCA='=mlx5_0:1', 1 channel
    """
    variables = shell_words(environment(settings))
    return ", ".join([*(variables or ["default settings"]), _channels(settings)])


def choice_words(name: ChoiceName, settings: Settings) -> str:
    """Return a choice in one line: its variables, and the channels of a graph file.

    >>> choice_words("variables", Settings(p2p_level="SYS", channels=2))
    'variables only, NCCL_P2P_LEVEL=SYS'
    """
    if name == "default":
        return CHOICE_WORDS[name]
    variables, _, channels = settings_words(settings).rpartition(", ")
    words = [CHOICE_WORDS[name], variables, *([channels] if name == "graph" else ())]
    return ", ".join(words)


def subset_files(plan: Plan) -> Iterator[tuple[tuple[int, ...], str, SubsetRings]]:
    """Yield sets of GPUs whose communicators get a graph file by the plugin, and their rings."""
    for gpus, name in graph_files(plan).items():
        rings = plan.subset(gpus)
        if rings is not None:
            yield gpus, name, rings


def ring_lines(rings: Sequence[tuple[int, ...]]) -> list[str]:
    """Return a line for each different ring with the channels that run it.

    >>> ring_lines([(0, 1, 2), (0, 2, 1), (0, 1, 2)])
    ['channels 0 2: 0 1 2', 'channel 1: 0 2 1']
    """
    channels: dict[tuple[int, ...], list[str]] = {}
    for channel, ring in enumerate(rings):
        channels.setdefault(ring, []).append(str(channel))
    lines = []
    for ring, numbers in channels.items():
        shown = " ".join(map(str, ring[:_MOST_RANKS]))
        more = f" ... ({len(ring)} ranks)" if len(ring) > _MOST_RANKS else ""
        lines.append(f"channel{'s' * (len(numbers) > 1)} {' '.join(numbers)}: {shown}{more}")
    return lines


_MOST_ORDER = 1000
"""Characters of the hosts' order that a terminal has room for."""


def summary(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield facts of a plan, each with its name."""
    plan = plan.as_shown
    # No assumed value lies behind the limit unless one does behind the graph files.
    mark = plan.provenance_of("graph")
    if not plan.cluster.closes:
        changed = "another order than given" if plan.order_changed else "as given"
        order = compress(plan.host_order)
        if len(order) > _MOST_ORDER:
            begin = order[:_MOST_ORDER].rpartition(",")[0]
            order = f"{begin}, ... (nccl/order/hosts.txt has all)"
        yield "host order", f"{changed}: {order}"
    if plan.whole_ring_gbps is not None:
        yield "whole rings", f"{plan.whole_ring_gbps:.2f} GB/s with all hosts at once ({mark})"
    for choice in plan.choices:
        yield CHOICE_WORDS[choice], _choice_text(plan, choice)
    is_known = plan.bound_gbps is not None
    yield "bound", f"{plan.bound_gbps:.2f} GB/s, {proof(plan)}" if is_known else "not known"
    if limit := limit_text(plan):
        yield "limit", f"{plan.limit_gbps:.2f} GB/s ({mark}): {limit}"
    yield "plugin", _plugin_text(plan)
    unchecked = "" if plan.settings_verified else " (this version was not checked)"
    yield "NCCL", f"{plan.settings.version}{unchecked}"
    if plan.pinned_env:
        yield "pinned", pinned_env_text(plan.pinned_env)
    done = "simulated" if plan.simulated else "measured"
    more = f"{plan.sets_remembered} from memory or journal, {plan.sets_by_symmetry} by symmetry"
    cost = f"{spell(plan.sets_measured, 'set')} {done}, {more}"
    yield "cost", cost if _is_measured(plan) else "none: by the tables of a cluster's plan"


def limit_text(plan: Plan) -> str:
    """Return the meaning of the limit, and the share of what is fastest; "" if not known."""
    rates = {name: rate for name, (rate, _) in plan.rates.items()}
    best, name = max(rates.values()), plan.recommended
    recommended = rates[name] * (1 + AS_GOOD) >= best
    name = name if recommended else as_good(plan.rates)
    if not plan.limit_gbps or not (rate := rates[name]):
        return ""
    what = "the plan" if recommended else CHOICE_WORDS[name]
    if rate > plan.limit_gbps * (1 + AS_GOOD):
        return f"bare copies over the same hops, no faster than {what}"
    share = min(1.0, rate / plan.limit_gbps)
    gets = "gets" if recommended else "would get"
    return f"bare copies over the same hops; {what} {gets} {share:.0%} of it"


def proof(plan: Plan) -> str:
    """Return whether the plan is proven best, or best as far as known, and among which rings."""
    if not plan.at_bound:
        return "not proven best"
    among = "single rings" if plan.ring_count == 1 else f"sets of {plan.ring_count} rings"
    within = f"within 1 % among {among} under these settings"
    if plan.proven:
        return f"proven best {within}"
    return f"best found {within}; the bound rests on assumptions"


def assumptions(plan: Plan) -> list[str]:
    """Return what a plan assumes of its machines and for its bound, each in a sentence."""
    classes = plan.cluster.classes
    texts = (text for part in classes for text in part.knowledge.assumptions(part.machine))
    return list(dict.fromkeys((*texts, *plan.bound_assumptions)))


def _is_measured(plan: Plan) -> bool:
    """Return whether a plan is no job's, which is made of the tables of another."""
    return bool(plan.sets_measured or plan.sets_remembered)


def _plugin_text(plan: Plan) -> str:
    """Return what communicators get by the plugin."""
    files = files_of(plan)
    sets = files.sets
    if plan.recommended == "graph" and not sets:
        of_job = "by `tccl env DIR --plugin`"
        if _is_measured(plan):
            of_job = (
                "by `tccl env JOB --plugin` for a job's directory, which `tccl export DIR --hosts "
                "LIST -o JOB` makes"
            )
        return f"{of_job}; without it, launch with the files of nccl/order"
    needed, optional = map(shell_text, files.variables)
    more = f"default NCCL with {needed}" if needed else "default NCCL"
    if optional and plan.is_by_variables:
        count = spell(len(sets), "set")
        return f"{optional} for communicators over {count} of GPUs; {more} for others"
    rates = [rings.rate_gbps for _, _, rings in subset_files(plan)]
    if not rates:
        return f"{more} for every communicator"
    spread = " to ".join(dict.fromkeys((f"{min(rates):.2f}", f"{max(rates):.2f}")))
    return (
        f"a graph file for communicators over {spell(len(rates), 'set')} of GPUs, "
        f"{spread} GB/s (`tccl show --sets`); {more} for others"
    )


def _choice_text(plan: Plan, name: ChoiceName) -> str:
    """Return a line on one way to run NCCL: bandwidth, gain, and what to set."""
    choice, gain = plan.choices[name], plan.gain(name)
    is_known = choice.rate_gbps is not None
    known = f"{choice.rate_gbps:.2f} GB/s ({plan.provenance_of(name)})" if is_known else ""
    rate = known or unrated_text(choice)
    if choice.achieved_gbps is not None:
        rate += f", {choice.achieved_gbps:.2f} achieved"
    times = f", {gain:.2f}x default" if gain is not None and name != "default" else ""
    variables = variables_words(choice.settings)
    tried = "tried " if plan.cut_short else ""
    how = {
        "default": "NCCL as it runs here",
        "large-buffers": f"with {variables}: "
        + ("the least that runs" if name == plan.control else "chunks of send/recv as by default"),
        "variables": f"with {variables}" if variables else f"no variable {tried}helps",
        "graph": f"with a graph file of {_channels(choice.settings)}"
        + (f" and {variables}" if variables else "")
        + (" with placed bounce buffers" if choice.settings.shm_placement else ""),
    }[name]
    note = f"; {choice.note}" if choice.note else ""
    chosen = f" <- {recommended_words(plan)}" if name == plan.recommended else ""
    return f"{rate}{times}: {how}{note}{chosen}"


def unrated_text(choice: Choice) -> str:
    """Return why a choice has no rate, in a word or two."""
    return f"fails ({choice.fails.verdict})" if choice.fails else "not rated"


def recommended_words(plan: Plan) -> str:
    """Return the mark of the recommended choice, and why no smaller or faster one has it."""
    choice = plan.choices[plan.recommended]
    smaller = list(plan.choices)[: list(plan.choices).index(plan.recommended)]
    if smaller and all(plan.choices[name].fails for name in smaller):
        return "recommended: the smallest that runs"
    best = max(option.rate_gbps or 0.0 for option in plan.choices.values())
    by_jobs = plan.winner is not None or plan.jobs_ran
    if by_jobs or (choice.rate_gbps or 0.0) * (1 + AS_GOOD) >= best:
        return "recommended"
    return f"recommended: as good as the best within its 95 % interval, ±{choice.error:.0%}"


def _channels(settings: Settings) -> str:
    return spell(settings.channels, "channel")


class ShownChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run NCCL."""

    rate_gbps: Annotated[float | None, says("the predicted rate")]
    settings: Settings
    environment: Annotated[dict[str, str], says("NCCL's variables by name")]
    rings: Annotated[tuple[Order, ...], says("one for each channel")]
    achieved_gbps: Annotated[float | None, says("by the jobs of a verification")]
    assumed: Annotated[bool, says("some parameter behind it is neither measured nor published")]
    note: Annotated[str, says("why there is no rate")]
    fails: Annotated[Failure | UnsetType, says("of a choice that does not run")] = UNSET


class Communicator(msgspec.Struct, frozen=True, kw_only=True):
    """A smaller set of GPUs with a graph file."""

    gpus: Order
    graph_file: Annotated[str, says("below the plan's directory")]
    rings: tuple[Order, ...]
    rate_gbps: float


class ShownPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan; `tccl plan --json` and `tccl show --json` add what is beside it in a directory."""

    kind: Annotated[Literal["cluster"] | UnsetType, says("of several hosts alone")] = UNSET
    hosts: Annotated[
        tuple[str, ...] | UnsetType, says("in the plan's order, of several hosts alone")
    ] = UNSET
    machine: str | UnsetType = UNSET
    gpus: Order | UnsetType = UNSET
    communicators: tuple[Communicator, ...] | UnsetType = UNSET
    rings: Annotated[tuple[Order, ...], says("of the graph file; global ranks of several hosts")]
    rate_gbps: Annotated[float, says("of the graph file")]
    bound_gbps: Annotated[float | None, says("no rings under these settings are faster")]
    whole_ring_gbps: Annotated[float | UnsetType | None, says("all hosts at once, measured")] = (
        UNSET
    )
    limit_gbps: Annotated[float | UnsetType | None, says("bare copies over the same hops")] = UNSET
    proven: bool
    sets_measured: int
    simulated: bool
    assumed: Annotated[
        bool, says("a parameter behind the graph file's rate is not measured or published")
    ]
    dry_run: bool
    settings: Settings
    environment: dict[str, str]
    kept: Annotated[dict[str, str], says("the pinned environment")]
    recommended: ChoiceName
    choices: dict[ChoiceName, ShownChoice]
    cancelled: bool
    notices: tuple[str, ...]
    assumptions: Annotated[tuple[str, ...], says("the assumptions of bound and rates")]


def show_plan(plan: Plan) -> ShownPlan:
    """Return a plan as commands print it as JSON."""
    plan = plan.as_shown
    if plan.cluster.closes:
        files = ((gpus, f"nccl/{name}", rings) for gpus, name, rings in subset_files(plan))
        of_kind: dict[str, Any] = {
            "machine": plan.machine.name,
            "gpus": plan.gpus,
            "communicators": tuple(
                fill(Communicator, rings, gpus=gpus, graph_file=name) for gpus, name, rings in files
            ),
            "limit_gbps": plan.limit_gbps,
        }
    else:
        of_kind = {"kind": "cluster", "hosts": plan.host_order}
        of_kind["whole_ring_gbps"] = plan.whole_ring_gbps
    keys = ("rate_gbps", "bound_gbps", "proven", "sets_measured", "simulated", "assumed")
    return ShownPlan(
        **of_kind,
        **pick(plan, *keys, "dry_run", "settings", "recommended", "cancelled"),
        rings=plan.channel_rings,
        environment=environment(plan.settings),
        kept=dict(plan.pinned_env),
        choices={name: show_choice(choice) for name, choice in plan.choices.items()},
        notices=tuple(notices(plan)),
        assumptions=tuple(assumptions(plan)),
    )


def show_choice(choice: Choice) -> ShownChoice:
    """Return a way to run NCCL as commands print it as JSON."""
    return fill(ShownChoice, choice, rings=choice.rings or (), fails=choice.fails or UNSET)


def diff(plan: Plan, other: Plan) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two plans, by name: the first plan's value and the second's."""
    check_type(plan, "plan", Plan)
    check_type(other, "other", Plan)

    def facts(of: Plan) -> dict[str, Any]:
        names = ("rate_gbps", "bound_gbps", "recommended", "orders", "provenance", "pinned_env")
        return {
            "machines": tuple(node_class.machine.name for node_class in of.cluster.classes),
            "hosts": of.host_order,
            "gpus": of.class_gpus,
            **pick(of, *names),
            "default_gbps": of.choices["default"].rate_gbps,
            "large_buffers_gbps": large.rate_gbps
            if (large := of.choices.get("large-buffers"))
            else None,
            "variables_gbps": of.choices["variables"].rate_gbps,
            "environment": environment(of.settings),
            "channels": of.settings.channels,
            "large_buffers": environment(large.settings) if large else None,
            "variables": environment(of.choices["variables"].settings),
        }

    first, two = facts(plan), facts(other)
    return {name: (first[name], two[name]) for name in first if first[name] != two[name]}
