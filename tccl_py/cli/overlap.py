"""`tccl overlap`: transfers beside transfers, and beside compute, by NCCL and by memcpy."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from tccl_py.cli import options
from tccl_py.cli.options import arg, check_quoted, gpus_argument, in_range, one_of, opt, refuse
from tccl_py.cli.output import print_table, results
from tccl_py.cli.process import print_json
from tccl_py.errors import CTRL_C_AND_SIGTERM, InputError, counted, interrupts_put_off, require
from tccl_py.experiments.overlap import Backend, Pair, Pairs, time_overlap
from tccl_py.model.rings import direct_write
from tccl_py.model.transfer import flow_texts, parse_flow
from tccl_py.report.tables import GEMMS, PAIRS, Line, lines, overlap_lines
from tccl_py.sources.profiled import measured_machine

MIB = 1024 * 1024
_MOST_MIB = 4096
_MOST_RANKS = 16
_PAIR = re.compile(r"^G([0-9]{1,4})->G([0-9]{1,4})$", re.ASCII)
_MOST_PAIRS = 8
_DRY_RUN = "add --backend gloo for a dry run in host memory"


def overlap(
    sets: list[str] | None = arg(
        "[SET]...",
        "Pairs to run one after the other and together, as 0:2+0:3; both ways, out of one "
        "GPU, into one and through one if not given.",
        None,
    ),
    *,
    backend: str = opt("nccl|gloo", "GPUs, or a dry run in host memory.", default="nccl"),
    gpus: str | None = options.GPUS,
    ranks: int | None = opt("N", "With gloo: how many ranks; 2 if not given."),
    size: int = opt("MIB", "Size of one message in MiB.", default=64),
    messages: int = opt("N", "Messages of one transfer.", default=5),
    repeats: int = opt("N", "How often all is timed.", default=11),
    timeout: float = opt("SECONDS", "How long each of the two jobs may take.", default=300.0),
    json: bool = options.JSON,
) -> None:
    """Time transfers one after the other and together, and beside a matrix multiplication (GEMM).

    Once by NCCL (torch.distributed, a communicator for each pair), once by copy engines. Each time
    is a median with the 95 % interval. Needs torch; NCCL's variables come from the environment.

    Examples:

        tccl overlap
        tccl overlap 0:2+0:3 2:0+0:3 --size 64
        tccl overlap --backend gloo --size 4
    """
    one_of("--backend", backend, get_args(Backend))
    chosen = cast(Backend, backend)
    in_range("--size", size, _MOST_MIB)
    in_range("--messages", messages, 1000)
    in_range("--repeats", repeats, 1000)
    in_range("--timeout", timeout, 86_400)
    places = _places(chosen, gpus, ranks)
    check_quoted(sets or (), "G0->G1")
    pair_sets = parse_sets(sets, places) if sets else default_sets(len(places))
    if importlib.util.find_spec("torch") is None:
        raise InputError("tccl overlap", "needs torch", "`pip install torch`")
    counts = {"message_bytes": size * MIB, "messages": messages, "repeats": repeats}
    with interrupts_put_off(CTRL_C_AND_SIGTERM):
        outcomes = time_overlap(chosen, places, pair_sets, timeout=timeout, **counts)
    rows = [
        row
        for by, outcome in outcomes.items()
        for row in overlap_lines(by, outcome, places, messages=messages)
    ]
    pairs, products = ([row for row in rows if key in row] for key in ("set", "transfer"))
    first = outcomes[chosen].results[0]
    head: dict[str, Any] = {"backend": chosen, "dry_run": chosen == "gloo", "gpus": places}
    head |= {"gpu": first.device, "torch": first.torch, **counts}
    if json:
        print_json({**head, "pairs": pairs, "products": products})
    else:
        _print(head, pairs, products)


def default_sets(places: int) -> tuple[Pairs, ...]:
    """Return sets of two pairs: both ways, one way twice; from 3 GPUs on out, in and through one.

    >>> [len(default_sets(places)) for places in (2, 3, 4)]
    [2, 5, 6]
    """
    chosen: list[Pairs] = [((0, 1), (1, 0)), ((0, 1), (0, 1))]
    if places > 2:
        chosen += [((0, 1), (0, 2)), ((1, 0), (2, 0)), ((1, 0), (0, 2))]
    if places > 3:
        chosen.append(((0, 1), (2, 3)))
    return tuple(chosen)


def parse_sets(texts: Sequence[str], gpus: Sequence[int]) -> tuple[Pairs, ...]:
    """Return sets such as `G0->G2 G0->G3`, by places in `gpus`.

    >>> parse_sets(["G4->G6"], (4, 6))
    (((0, 1),),)
    """
    parsed = []
    for text in texts:
        where, words = f"set {text[:60]!r}", flow_texts(text)
        right = f"1 to {_MOST_PAIRS}, as 'G0->G1 G2->G3'"
        require(1 <= len(words) <= _MOST_PAIRS, where, f"has {len(words)} pairs", right)
        parsed.append(tuple(_parse_pair(word, gpus, where) for word in words))
    return tuple(parsed)


def _parse_pair(word: str, gpus: Sequence[int], where: str) -> Pair:
    flow = parse_flow(_PAIR.sub(r"\1:\2", word))
    source, target = flow.source.index, flow.destination.index
    if str(flow) != str(direct_write(source, target)):
        raise InputError(where, f"has {word[:30]!r}", "write pairs of GPUs, as G0->G1 or 0:1")
    if unknown := [gpu for gpu in (source, target) if gpu not in gpus]:
        right = f"the job has {', '.join(map(str, gpus))}"
        raise InputError(where, f"names GPU {unknown[0]}", right)
    return gpus.index(source), gpus.index(target)


def _places(backend: Backend, gpus: str | None, ranks: int | None) -> tuple[int, ...]:
    """Return NVML indices of the GPUs; for a dry run just numbers."""
    if backend == "gloo":
        refuse({"--gpus": gpus}, ("", "is for nccl", "gloo has --ranks"))
        count = 2 if ranks is None else ranks
        in_range("--ranks", count, _MOST_RANKS, least=2)
        return tuple(range(count))
    refuse({"--ranks": ranks}, ("", "is for gloo", "nccl has --gpus"))
    try:
        place = measured_machine()
    except InputError as error:
        raise InputError(error.where, error.what, _DRY_RUN) from error
    chosen = gpus_argument(gpus, place.machine)
    if chosen is None:
        chosen = place.gpus
    if len(chosen) < 2:
        raise InputError("tccl overlap", "has one GPU", "a transfer joins two")
    return chosen


def _print(head: Mapping[str, Any], pairs: Sequence[Line], products: Sequence[Line]) -> None:
    out = results()
    where = head["gpu"] or "host memory, a DRY RUN"
    out.print(
        f"{counted(head['messages'], 'message')} of {head['message_bytes'] // MIB} MiB on {where}, "
        f"torch {head['torch']}: ms, median of {head['repeats']} (95 % interval)"
    )
    print_table(out, lines(PAIRS, pairs))
    print_table(out, lines(GEMMS, products))
