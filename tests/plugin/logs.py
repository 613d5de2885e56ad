"""Rings of NCCL's log compared with those of a plan that the plugin handed over."""

import math
import re
from collections import Counter

from tccl_py.nccl.communicators import parse_log, same_rings
from tccl_py.plan.chains import per_channel
from tccl_py.plan.directory import graph_files

_START = re.compile(r"rank (\d+) nranks (\d+) .*- Init START")
_CHOSEN = re.compile(r"tccl: rank (\d+) of (\d+): (?:graph file (\S+) of |default NCCL: (.*))")
_UNPLANNED = "default NCCL: the plan has nothing for these GPUs"
_THREAD = re.compile(r"^\S*?:(\d+:\d+) ")


def made_in(log):
    """Communicators of a process: rank, ranks, the plugin's word, and the lines of the log.

    Lines of concurrent initialisations are told apart by their threads.
    """
    threads = {}
    for line in log.splitlines():
        match = _THREAD.match(line)
        if match is None:
            continue
        found = threads.setdefault(match[1], [])
        start = _START.search(line)
        if start is not None:
            found.append((int(start[1]), int(start[2]), [], []))
        if found:
            found[-1][3].append(line)
            chosen = _CHOSEN.search(line)
            if chosen is not None:
                found[-1][2].append(chosen[3] or f"default NCCL: {chosen[4]}")
    return [made for found in threads.values() for made in found]


def assert_own_rings(plan, logs):
    """Each communicator over GPUs with a file has its rings; single GPUs have none.

    Those over GPUs that the plan has no file for are default NCCL. `logs` are by GPU. Returns how
    many communicators there are over each set of GPUs with a file.
    """
    files = {name: gpus for gpus, name in graph_files(plan).items()}
    counts, order, rings = Counter(), {}, {}
    for gpu, log in enumerate(logs):
        own = Counter()
        for rank, ranks, words, lines in made_in(log):
            if ranks == 1:
                assert words == [], (gpu, words)
                continue
            alike = math.comb(len(plan.gpus), ranks)
            if words == [_UNPLANNED] and sum(len(one) == ranks for one in files.values()) < alike:
                continue
            assert len(words) == 1 and words[0] in files, (gpu, rank, ranks, words)
            gpus = files[words[0]]
            assert len(gpus) == ranks and gpu in gpus, (gpu, rank, ranks, gpus)
            # Its members made the communicators over a set one after another.
            name = gpus, own[gpus]
            own[gpus] += 1
            order.setdefault(name, {})[rank] = gpu
            if rank == 0:
                counts[gpus] += 1
                found = parse_log("\n".join(lines), where=f"GPU {gpu}, {gpus}")
                (rings[name],) = found.communicators
    for (gpus, number), members in order.items():
        assert sorted(members) == list(range(len(gpus))), (gpus, number, members)
        assert tuple(sorted(members.values())) == gpus, (gpus, number, members)
        wanted = per_channel(plan.subset(gpus).rings, plan.settings.channels)
        found = rings[gpus, number]
        assert len(found) >= len(wanted)
        for channel, ring in enumerate(found):
            by_gpu = tuple(members[rank] for rank in ring)
            assert same_rings(by_gpu, wanted[channel % len(wanted)]), (gpus, channel, by_gpu)
    return counts
