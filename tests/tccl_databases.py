"""Databases of the TCCL fork for tests: drawn by hypothesis, and small ones by hand."""

import itertools

from hypothesis import strategies as st

from tccl_py.tccl_fork.database import (
    Crossing,
    Database,
    GpuRing,
    NodeChain,
    NodeChains,
    TypedTransfer,
    index_bits,
)

CODES = ("GPU_GPU_INTER", "GPU_CPU_INTER", "CPU_GPU_INTER", "CPU_CPU_INTER")


def gpus_of(mask):
    """The GPUs of a bit mask, ascending."""
    return tuple(gpu for gpu in range(mask.bit_length()) if mask >> gpu & 1)


def leaves_gpu(crossing):
    return crossing.type.startswith("GPU_")


def lands_in_gpu(crossing):
    return crossing.type.endswith("_GPU_INTER")


def kind(from_gpu, to_gpu):
    return f"{'GPU' if from_gpu else 'CPU'}_{'GPU' if to_gpu else 'CPU'}_INTER"


def encoded(crossing, bits):
    """The fork's number of a crossing, with `bits` bits per index: 29 for GPU_CPU 3 to 1 by 2."""
    return CODES.index(crossing.type) | crossing.source << 2 | crossing.destination << (2 + bits)


def move(name, source, destination):
    """`move("write gpu", 0, 1)`, `move("read cpu", 0, 1)`; MEMCPY with `copy` before it."""
    *copy, verb, memory = name.split()
    kind = "MEMCPY" if copy else "KERNEL"
    return TypedTransfer(f"GPU_{verb.upper()}_{memory.upper()}MEM_{kind}", source, destination)


def small_database():
    """Two GPUs, two NUMA nodes: a ring, a chain over one GPU and one over both."""
    landed = Crossing("GPU_CPU_INTER", 0, 1)
    ring = (move("write cpu", 0, 1), move("read cpu", 1, 1), move("read gpu", 1, 0))
    both = (move("read cpu", 1, 1), move("copy write gpu", 1, 0))
    alone = (move("read cpu", 1, 0),)
    return Database(
        num_gpus=2,
        num_numa=2,
        num_bits=1,
        intra=(GpuRing(mask=3, gbps=12.5, transfers=ring),),
        inter=(
            NodeChains(
                mask=1, chains=(NodeChain(head=landed, tail=landed, gbps=3.0, transfers=alone),)
            ),
            NodeChains(
                mask=3, chains=(NodeChain(head=landed, tail=landed, gbps=2.0, transfers=both),)
            ),
        ),
    )


@st.composite
def databases(draw, *, most_gpus=5):
    num_gpus = draw(st.integers(1, most_gpus))
    num_numa = draw(st.integers(1, 3))
    masks = st.sets(st.integers(1, 2**num_gpus - 1), max_size=6)
    rings = [mask for mask in sorted(draw(masks)) if len(gpus_of(mask)) > 1]
    return Database(
        num_gpus=num_gpus,
        num_numa=num_numa,
        num_bits=index_bits(num_gpus, num_numa),
        intra=tuple(draw(ring(mask, num_numa)) for mask in rings),
        inter=tuple(draw(chains(mask, num_gpus, num_numa)) for mask in sorted(draw(masks))),
    )


RATES = st.floats(1e-3, 1e5, exclude_min=True)


@st.composite
def ring(draw, mask, num_numa):
    order = draw(st.permutations(gpus_of(mask)))
    transfers = draw(moves([*order, order[0]], num_numa))
    # A ring may begin with any transfer, also with the read of a bounce.
    start = draw(st.integers(0, len(transfers) - 1))
    transfers = (*transfers[start:], *transfers[:start])
    return GpuRing(mask=mask, gbps=draw(RATES), transfers=transfers)


@st.composite
def chains(draw, mask, num_gpus, num_numa):
    found = draw(st.lists(chain(mask, num_gpus, num_numa), max_size=5))
    unique = {(one.head, one.tail): one for one in found if one.transfers}
    return NodeChains(mask=mask, chains=tuple(unique.values()))


@st.composite
def chain(draw, mask, num_gpus, num_numa):
    order = draw(st.permutations(gpus_of(mask)))
    numa, gpu, kernel = st.integers(0, num_numa - 1), st.integers(0, num_gpus - 1), st.booleans()
    lands, leaves, far_out, far_in = (draw(st.booleans()) for _ in range(4))
    entry = order[0] if lands else draw(numa)
    way_out = order[-1] if leaves else draw(numa)
    inside = draw(moves(order, num_numa))
    if not lands:
        inside = (move(f"{'' if draw(kernel) else 'copy '}read cpu", entry, order[0]), *inside)
    if not leaves:
        inside = (*inside, move(f"{'' if draw(kernel) else 'copy '}write cpu", order[-1], way_out))
    return NodeChain(
        head=Crossing(kind(far_out, lands), draw(gpu if far_out else numa), entry),
        tail=Crossing(kind(leaves, far_in), way_out, draw(gpu if far_in else numa)),
        gbps=draw(RATES),
        transfers=inside,
    )


@st.composite
def moves(draw, order, num_numa):
    found = []
    for source, target in itertools.pairwise(order):
        copy = draw(st.sampled_from(("", "copy ")))
        # The fork's runtime has no reads of GPU memory by copy engines.
        kind = draw(st.sampled_from(("write gpu", "read gpu", "bounce")))
        if kind != "bounce":
            found.append(move(kind if kind == "read gpu" else copy + kind, source, target))
            continue
        node = draw(st.integers(0, num_numa - 1))
        other = draw(st.sampled_from(("", "copy ")))
        found += [move(f"{copy}write cpu", source, node), move(f"{other}read cpu", node, target)]
    return tuple(found)
