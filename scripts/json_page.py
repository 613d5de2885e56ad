"""Write docs/json.md and the JSON Schemas in docs/schemas from the types below.

usage: python -m scripts.json_page

The types name the keys that `--json` prints, in order; tests compare them with real output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tccl_py.experiments.preflight import Problem
from tccl_py.experiments.record import Tried
from tccl_py.experiments.spec import WrongValue
from tccl_py.health.advice import Advice
from tccl_py.health.comparison import HostsCompared
from tccl_py.health.doctor import Diagnosis
from tccl_py.model.links import Proof
from tccl_py.nccl.settings import Settings
from tccl_py.plan.chains import ChoiceName, Failure
from tccl_py.workloads.workload import Workload

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEAD = """# JSON keys

Commands that print a table take `--json`. Keys are kept: later versions add some and take none out.
Rates are GB/s, a rate that is not known is null, and `environment` is an object of variables. Each
command has a [JSON Schema](https://json-schema.org), which tests compare with real output. Made by
`python -m scripts.json_page`.
"""


def says(text: str) -> Meta:
    """Return the text on a key."""
    return Meta(description=text)


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys in their order."""


Variables = Annotated[dict[str, str], says("NCCL's variables by name")]


class Choice(Keys, kw_only=True):
    """One way to run NCCL."""

    rate_gbps: Annotated[float | None, says("the predicted rate")]
    settings: Settings
    environment: Variables
    rings: Annotated[list[list[int]], says("a list for each channel")]
    achieved_gbps: Annotated[float | None, says("by the jobs of a verification")]
    assumed: Annotated[bool, says("some parameter behind it is neither measured nor published")]
    note: Annotated[str, says("why there is no rate")]
    fails: Annotated[Failure | UnsetType, says("of a choice that does not run")] = UNSET


class Choices(Keys, kw_only=True):
    """The ways to run NCCL."""

    default: Choice
    large_buffers: Annotated[
        Choice | UnsetType, says("where variables alone take chunks from send/recv")
    ] = msgspec.field(default=UNSET, name="large-buffers")
    variables: Choice
    graph: Choice


class Communicator(Keys, kw_only=True):
    """A smaller set of GPUs with a graph file."""

    gpus: list[int]
    graph_file: Annotated[str, says("below the plan's directory")]
    rings: list[list[int]]
    rate_gbps: float


class BySize(Keys, kw_only=True):
    """NCCL's choice for a message size."""

    choice: ChoiceName
    collective: str
    bytes: int
    algorithm: str
    protocol: str
    channels: int


class Entry(Keys, kw_only=True):
    """A range of message sizes in the table of the plugin's tuner."""

    collective: str
    from_bytes: int
    to_bytes: int
    algorithm: str
    protocol: str
    channels: int = 0


class Predictions(Keys, kw_only=True):
    """Predictions of a sweep that fresh jobs judged."""

    right: int
    asked: int


class TunedRow(Keys, kw_only=True):
    """A message size of a tuning."""

    collective: str
    dtype: str
    bytes: int
    us: Annotated[dict[str, float], says("the median time by arm")]
    choice: Annotated[dict[str, Any] | None, says("`algorithm`, `protocol`, `channels`")]
    swept: Annotated[dict[str, float], says("`middle`, `low`, `high` of the sweep's ratio")]
    fresh: Annotated[dict[str, float] | None, says("the same of fresh jobs")]
    over_default: Annotated[dict[str, float] | None, says("the same over default NCCL")]
    predicted_gain: bool
    kept: Annotated[bool, says("whether the table has an entry for the row")]


class Tuning(Keys, kw_only=True):
    """The tuning of a set of GPUs by message size."""

    gpus: list[int]
    arm: ChoiceName
    rows: list[TunedRow]
    entries: list[Entry]
    predictions: Predictions
    by_plugin: Annotated[list[TunedRow], says("rows under the plugin's own table")]
    seconds: float


class Plan(Keys, kw_only=True):
    """`tccl plan --json` and `tccl show --json`."""

    kind: Annotated[Literal["cluster"] | UnsetType, says("of several hosts alone")] = UNSET
    hosts: Annotated[list[str] | UnsetType, says("in the plan's order, of several hosts alone")] = (
        UNSET
    )
    machine: str | UnsetType = UNSET
    gpus: list[int] | UnsetType = UNSET
    communicators: list[Communicator] | UnsetType = UNSET
    rings: Annotated[
        list[list[int]], says("of the recommended choice; global ranks of several hosts")
    ]
    rate_gbps: Annotated[float, says("of the recommended choice")]
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
    environment: Variables
    kept: Annotated[dict[str, str], says("the pinned environment")]
    recommended: ChoiceName
    choices: Choices
    cancelled: bool
    notices: list[str]
    assumptions: Annotated[list[str], says("the assumptions of bound and rates")]
    limits: Annotated[list[str], says("parts of the machine that limit it before NCCL does")]
    by_size: list[BySize]
    tunings: list[Tuning]
    links: Annotated[Proof | UnsetType, says("the proof by which it was planned")] = UNSET
    workload: Annotated[Communication | UnsetType, says("with `--workload`: predicted")] = UNSET
    trade_offs: Annotated[list[TradeOff] | UnsetType, says("of a verified plan")] = UNSET


class Env(Keys, kw_only=True):
    """`tccl env --json`."""

    gpus: list[int] | UnsetType = UNSET
    host: Annotated[str | UnsetType | None, says("of several hosts alone")] = UNSET
    off: Annotated[str | UnsetType, says("why the plan is disabled")] = UNSET
    choice: Annotated[ChoiceName | UnsetType, says("the delivered choice")] = UNSET
    environment: Variables
    simulated: bool
    dry_run: bool


class Compared(Keys, kw_only=True):
    """A timed row of an arm beside default NCCL; `ratio` above 1 is faster."""

    bytes: int | UnsetType = UNSET
    mode: Annotated[
        str | UnsetType, says("of a training step, in place of `bytes`; `copy` by copy engines")
    ] = UNSET
    groups: Annotated[
        list[list[int]] | UnsetType,
        says("members of smaller communicators: GPUs, or ranks of several hosts"),
    ] = UNSET
    us: float
    gbps: Annotated[float | None, says("bus bandwidth")]
    ratio: float
    low: Annotated[float, says("the 95 % interval of `ratio`")]
    high: float
    verdict: Literal["better", "same", "worse"]
    harm: Annotated[
        Literal["none", "open", "loses"] | None,
        says("of a choice: `open` if a loss of 5 % might not have been seen"),
    ]
    collective: Annotated[str | UnsetType, says("of `transfers`")] = UNSET
    beside: Annotated[list[Any] | UnsetType, says("of `transfers`: a GEMM that runs at once")] = (
        UNSET
    )


class SameRings(Keys, kw_only=True):
    """Rings of NCCL's log beside the planned ones."""

    same: bool
    differences: list[str]


class Arm(Keys, kw_only=True):
    """A choice in the jobs of a verification."""

    name: ChoiceName
    accepted: bool
    objections: list[str]
    gbps: Annotated[float | None, says("achieved at 64 MiB and above")]
    ratio: Annotated[float, says("over default NCCL at these sizes")]
    low: float
    high: float
    predicted_gbps: float | None
    environment: Variables
    settings: Settings
    sizes: list[Compared]
    groups: Annotated[list[Compared], says("smaller communicators")]
    training: list[Compared]
    transfers: Annotated[list[Compared], says("send/recv and all-to-all")]
    not_recommended: Annotated[list[int], says("sizes in bytes at which it loses")]
    checked: Annotated[int, says("compared values of collectives")]
    wrong: list[WrongValue]
    rings: Annotated[SameRings | None, says("null without a log")]
    failure: Annotated[str, says("why its job failed")]


class Span(Keys, kw_only=True):
    """A ratio to default NCCL's speed with its 95 % interval; above 1 is faster."""

    middle: float
    low: float
    high: float


class StepTime(Keys, kw_only=True):
    """The communication of a step by a choice."""

    seconds: float
    low: Annotated[float, says("the 95 % interval of `seconds`")]
    high: float
    speed: Span
    faster: Annotated[bool, says("beyond chance")]


class RowTime(Keys, kw_only=True):
    """A row of a workload by each choice that has times of it."""

    collective: str
    dtype: str
    bytes: int
    groups: Annotated[list[list[int]], says("ranks; empty for all")]
    mode: str
    beside: Annotated[list[Any], says("rows that run at once")]
    calls: Annotated[float, says("in a step")]
    seconds: Annotated[dict[ChoiceName, float], says("of a call")]
    speed: dict[ChoiceName, Span]


class Communication(Keys, kw_only=True):
    """The communication of a job's step, one call after the other."""

    name: str
    digest: Annotated[str, says("of the workload's rows")]
    chosen: Annotated[ChoiceName, says("the choice whose time decides")]
    choices: Annotated[dict[ChoiceName, StepTime], says("those with times of all rows")]
    rows: list[RowTime]
    unknown: Annotated[float, says("the share of calls without times")]
    basis: Annotated[str, says("of other times than those of jobs on GPUs: what they rest on")]


class TradeOff(Keys, kw_only=True):
    """A choice and its speed over default NCCL's for each bundled workload."""

    choice: ChoiceName
    harmless: bool
    workloads: Annotated[dict[str, float], says("estimated from the rows; without unknown ones")]


class Verify(Keys, kw_only=True):
    """`tccl verify --json`."""

    machine: str
    accepted: Annotated[
        bool, says("whether `chosen` may be used; decides the exit code without `--workload`")
    ]
    winner: Annotated[ChoiceName, says("the best by jobs")]
    recommended: Annotated[ChoiceName, says("the plan's choice")]
    chosen: Annotated[ChoiceName, says("the choice in question: `--choice`, or `recommended`")]
    arms: Annotated[list[Arm], says("`default` first")]
    workload: Annotated[Communication | None, says("with `--workload`")]
    trade_offs: Annotated[list[TradeOff], says("the choices that none dominates")]
    simulated: Annotated[bool, says("whether predictions are simulated")]
    dry_run: bool
    tried: Annotated[list[Tried], says("candidates of `--tune`")]
    rounds: Annotated[int, says("jobs of each arm")]
    seconds: float
    hosts: Annotated[list[str], says("in rank order; none of one machine")]
    backend: str
    collective: str
    devices: Annotated[list[str], says("names in rank order")]
    versions: dict[str, str]
    notices: list[str]
    default_fails: Annotated[str, says("why a job of default NCCL failed")]
    tunings: list[Tuning]


class Change(Keys, kw_only=True):
    """A set whose rate changed; the rates are those of the flow that fell most."""

    set: str
    flow: str
    was_gbps: float
    is_gbps: float
    ratio: float
    p: float
    hosts: Annotated[str | UnsetType, says("their class, where there are several")] = UNSET


class Bandwidth(Keys, kw_only=True):
    """A collective of a preflight."""

    bytes: int
    gbps: float
    expected_gbps: Annotated[float | None, says("when the plan was verified")]
    p: float | None


class Check(Keys, kw_only=True):
    """`tccl check --json`; the first six keys with `--preflight` alone."""

    ok: Annotated[bool | UnsetType, says("whether jobs may run")] = UNSET
    values_right: Annotated[bool | UnsetType, says("whether no result was wrong")] = UNSET
    findings: list[Problem] | UnsetType = UNSET
    collective: str | UnsetType = UNSET
    collectives_checked: int | UnsetType = UNSET
    bandwidths: list[Bandwidth] | UnsetType = UNSET
    links: Annotated[Proof | UnsetType, says("of a plan that was measured on GPUs here")] = UNSET
    machine: str
    drifted: bool
    sets_compared: int
    false_alarm_rate: float
    changes: Annotated[list[Change], says("worst first")]
    points_to: Annotated[str, says("the suspected part")]
    lost: Annotated[dict[str, str], says("why a set could not be measured, by set")]
    skipped: list[str]
    seconds: float
    simulated: bool
    dry_run: bool


class Measured(Keys, kw_only=True):
    """A set of `tccl measure --json`; the keys from `skew_us` on only of measured ones."""

    set: str
    gbps: Annotated[list[float], says("of each flow")]
    total_gbps: float
    simulated: bool
    assumed: bool
    dry_run: bool
    skew_us: float | UnsetType | None = UNSET
    skew_error_us: float | UnsetType | None = UNSET
    overlap: float | UnsetType | None = UNSET
    overlap_at_least: bool | UnsetType = UNSET
    spread: Annotated[list[float | None] | UnsetType, says("width of the 95 % interval")] = UNSET
    repeats: int | UnsetType = UNSET
    settled: bool | UnsetType = UNSET
    outliers: Any = UNSET


class Difference(Keys, kw_only=True):
    """A fact in which two plans differ, as `tccl show DIR OTHER --json` prints it."""

    what: str
    values: Annotated[list[Any], says("of the first plan and of the second")]


class Pair(Keys, kw_only=True):
    """A pair of `tccl measure --json` without sets."""

    from_: int = msgspec.field(name="from")
    to: int
    gbps: Annotated[float | None, says("null where it failed")]
    latency_us: Annotated[float | None, says("of models null")]
    via: Annotated[str, says("`direct`, or a NUMA node")]
    simulated: bool
    dry_run: bool


class Judged(Keys, kw_only=True):
    """`tccl validate --json`."""

    verdict: Literal["used", "clipped", "ignored", "rejected", "crash"]
    reason: str
    rings: Annotated[list[list[int]], says("of the final channels, as ranks")]


COMMANDS: Mapping[str, Any] = {
    "plan": Plan,
    "env": Env,
    "verify": Verify,
    "check": Check,
    "advise": Advice,
    "measure": list[Measured],
    "pairs": list[Pair],
    "diff": list[Difference],
    "doctor": Diagnosis,
    "hosts": HostsCompared,
    "validate": Judged,
    "workload": Workload,
}
TITLES = {
    "plan": "tccl plan, tccl show",
    "pairs": "tccl measure without sets",
    "diff": "tccl show of two plans",
    "hosts": "tccl doctor --compare",
}


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a command's output, to which later versions may add keys."""
    made = msgspec.json.schema(COMMANDS[name])
    for part in made.get("$defs", {}).values():
        if part.get("additionalProperties") is False:
            del part["additionalProperties"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def words(part: Mapping[str, Any]) -> str:
    """Return the type of a key in words; types with keys of their own by their names."""
    if "$ref" in part:
        return str(part["$ref"]).rpartition("/")[2]
    if "anyOf" in part:
        return " or ".join(map(words, part["anyOf"]))
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if part.get("type") == "array":
        items = part.get("items") or (part.get("prefixItems") or [{}])[0]
        return f"list of {words(items)}" if items else "list"
    if part.get("type") == "object":
        values = part.get("additionalProperties")
        return f"object of {words(values)}" if isinstance(values, dict) else "object"
    return str(part.get("type", "any"))


def tables(name: str, seen: set[str]) -> Iterator[str]:
    """Yield the tables of a command: its own keys, then those of its types."""
    made = schema(name)
    yield f"\n## {TITLES.get(name, f'tccl {name}')}\n\n[Schema](schemas/{name}.json)"
    if "items" in made:
        yield f"A list of {words(made['items'])}."
    for title, part in made.get("$defs", {}).items():
        if title in seen or "properties" not in part:
            continue
        seen.add(title)
        about = part.get("description", "").partition("\n")[0]
        yield f"\n**{title}**: {about}\n\n| key | type | is |\n|---|---|---|"
        for key, value in part["properties"].items():
            optional = "" if key in part.get("required", ()) else " (not always)"
            yield f"| `{key}` | {words(value)}{optional} | {value.get('description', '')} |"


def pages() -> dict[Path, str]:
    """Return the page and the schemas by their paths."""
    seen: set[str] = set()
    lines = [HEAD.rstrip(), *(line for name in COMMANDS for line in tables(name, seen))]
    files = {DOCS / "json.md": "\n".join(lines) + "\n"}
    for name in COMMANDS:
        text = msgspec.json.format(msgspec.json.encode(schema(name)), indent=1).decode()
        files[DOCS / "schemas" / f"{name}.json"] = text + "\n"
    return files


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
