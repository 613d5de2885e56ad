"""Programs of a rank: each makes communicators in one of the ways of real programs."""

import random

from tests.plugin.mixtures import draw
from tests.plugin.ranks import NO_COLOR


def world(job):
    job.init("world", range(job.size))


def collectives(job):
    """Collectives of growing sizes."""
    comm = job.init("world", range(job.size))
    for name in ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"):
        for power in range(10, 29, 2):
            job.collective(comm, name, 1 << power)
    job.destroy(comm)


def few(job):
    """World and pairs."""
    job.init("world", range(job.size))
    for first in range(0, job.size - 1, 2):
        job.init(f"pair{first}", [first, first + 1])


def calls(job):
    """Many all-reduces of 64 KiB; the record's seconds are the least mean of a call of ten runs."""
    comm = job.init("world", range(job.size))
    job.time_calls(comm, 1 << 16, job.argument)


def many(job):
    """World, pairs, a single GPU, triples, then some again without blocking."""
    job.init("world", range(job.size))
    for first in range(0, job.size - 1, 2):
        job.init(f"pair{first}", [first, first + 1])
    job.init("single", [0])
    if job.size > 2:
        job.init("triple", [2, 0, 1])
    job.init("later", range(job.size), blocking=False)
    for first in range(min(2, job.size - 2)):
        job.init(f"cross{first}", [first, first + 2], blocking=False)


def split(job):
    """Halves, then the first three ranks; children with resources of their own."""
    _split(job, share=False)


def share(job):
    _split(job, share=True)


def _split(job, *, share):
    parent = job.init("world", range(job.size), share=share)
    half = [rank for rank in range(job.size) if rank // 2 == job.rank // 2]
    job.split("halves", parent, job.rank // 2, half, key=job.rank, share=share)
    first = list(range(min(3, job.size)))
    color = 0 if job.rank in first else NO_COLOR
    job.split("first", parent, color, first, key=job.rank, share=share)
    back = list(reversed(range(job.size)))
    job.split("reversed", parent, 1, back, key=-job.rank, share=share)


def group(job):
    """Two communicators of this rank in one group."""
    both = [("one", range(job.size)), ("two", list(reversed(range(job.size))))]
    job.group(True)
    comms = [job.begin(name, ranks) for name, ranks in both]
    job.group(False)
    job.finish_group("both", comms)


def one_process(job):
    """All GPUs in one process: ncclCommInitAll, then pairs."""
    count = job.argument
    job.init_all("all", count)
    for first in range(0, count - 1, 2):
        job.group(True)
        comms = []
        for at in range(2):
            job.use(first + at)
            comms.append(job.begin(f"pair{first}", [first, first + 1], at=at))
        job.group(False)
        job.finish_group(f"pair{first} of one process", comms)


def shrunk(job):
    """World, then without its last rank."""
    parent = job.init("world", range(job.size))
    if job.rank < job.size - 1:
        job.shrink("rest", parent, [job.size - 1])


def own_file_later(job):
    """A program that sets NCCL_GRAPH_FILE itself for its second communicator."""
    import os  # noqa: PLC0415

    job.init("world", range(job.size))
    os.environ["NCCL_GRAPH_FILE"] = os.environ["OWN_FILE"]
    job.init("own", range(job.size))
    del os.environ["NCCL_GRAPH_FILE"]
    job.init("again", range(job.size))


def mixture(job):
    """The communicators of a random mixture of ranks (tests/plugin/mixtures.py)."""
    for number, ranks in enumerate(draw(job.argument).communicators):
        job.init(f"{number}", list(ranks))


def sequence(job):
    """A random sequence of creations, splits, aborts and destroys, the same on all ranks."""
    source = random.Random(job.argument)
    comms = {}
    for step in range(source.randint(3, 7)):
        what = source.choice(("init", "init", "group", "split", "split", "end"))
        name = f"{what}{step}"
        if what == "init":
            ranks = _some(source, range(job.size))
            blocking, share = source.random() < 0.6, source.random() < 0.25
            comm = job.init(name, ranks, blocking=blocking, share=share)
            comms[name] = (ranks, comm)
        elif what == "group":
            sets = [_some(source, range(job.size)) for _ in range(source.randint(1, 3))]
            job.group(True)
            begun = [
                job.begin(f"{name}.{i}", ranks) if job.rank in ranks else None
                for i, ranks in enumerate(sets)
            ]
            job.group(False)
            job.finish_group(name, [comm for comm in begun if comm is not None])
            for i, (ranks, comm) in enumerate(zip(sets, begun, strict=True)):
                comms[f"{name}.{i}"] = (ranks, comm)
        elif comms:
            chosen = source.choice(sorted(comms))
            ranks, comm = comms[chosen]
            if what == "split":
                comms |= _random_split(job, source, name, ranks, comm)
            else:
                how = source.choice(("Destroy", "Destroy", "Abort"))
                del comms[chosen]
                if comm is not None:
                    job.destroy(comm, how=how)
    job.barrier("end")


def _random_split(job, source, name, ranks, comm):
    share = source.random() < 0.25
    colors = {rank: source.choice((0, 0, 1, NO_COLOR)) for rank in ranks}
    keys = {rank: source.randint(0, 9) for rank in ranks}
    found = {}
    for color in (0, 1):
        # NCCL orders equal keys by the ranks of the parent.
        own = sorted((r for r in ranks if colors[r] == color), key=lambda rank: keys[rank])
        if job.rank in own:
            child = job.split(f"{name}.{color}", comm, color, own, key=keys[job.rank], share=share)
            found[f"{name}.{color}"] = (own, child)
        elif own:
            found[f"{name}.{color}"] = (own, None)
    if comm is not None and colors[job.rank] == NO_COLOR:
        job.split(f"{name}.none", comm, NO_COLOR, [])
    return found


def _some(source, ranks):
    return source.sample(list(ranks), source.randint(1, len(ranks)))
