"""Stand for hardware in tests: sources and hop spaces for the search, a pool for the profiler."""

import functools

import msgspec
import numpy as np

from tccl_profiler.messages import Pinged
from tccl_profiler.pool import RunResult
from tccl_profiler.shared_memory import RECORD
from tccl_py.model.measurement import Measurement
from tccl_py.model.rings import Hop, HopSpace, bounce, direct_read, direct_write


def space_of(gpus, *, mechanisms=1, missing=()):
    """Every ordered pair but `missing`; mechanisms are write, read, bounce by C0."""
    makers = (direct_write, direct_read, lambda i, j: bounce(i, j, 0))[:mechanisms]
    hops = {
        (i, j): tuple(Hop(i, j, make(i, j)) for make in makers)
        for i in gpus
        for j in gpus
        if i != j and (i, j) not in missing
    }
    return HopSpace(name="test", gpus=tuple(gpus), hops=hops)


class SharedResources:
    """Each flow uses some resources; a resource's capacity is shared equally by its flows.

    The slowest share is every flow's rate, so adding flows never helps. `alone` overrides what a
    flow gets at most, by its text. Keeps every set it was asked for in `calls`. `bounds_hold` says
    that rates are as symmetric as the machine is described, which nobody knows of hardware.
    """

    simulated = True

    def __init__(self, uses, capacity, *, alone=None, noise=0.0, seed=0, bounds_hold=False):
        self.bounds_hold = bounds_hold
        self.uses, self.capacity, self.alone = uses, capacity, alone or {}
        self.noise, self.random = noise, np.random.default_rng(seed)
        self.calls = []

    def true_rate(self, transfers):
        load = {}
        for flow in transfers.flows:
            for resource in self.uses(flow):
                load[resource] = load.get(resource, 0) + 1
        rates = [self.capacity(resource) / count for resource, count in load.items()]
        rates += [self.alone[str(flow)] for flow in transfers.flows if str(flow) in self.alone]
        return min(rates)

    def measure(self, sets):
        answers = []
        for transfers in sets:
            self.calls.append(str(transfers))
            rate = self.true_rate(transfers)
            if self.noise:
                rate *= 1 + self.noise * self.random.standard_normal()
            answers.append(
                Measurement(
                    transfers=transfers,
                    samples_gbps=tuple((rate,) for _ in transfers.flows),
                    simulated=True,
                )
            )
        return answers


def random_resources(seed, *, resources=6, noise=0.0):
    """A source whose flows use a few of some shared resources, and one of their own."""

    def own_random(key):
        return np.random.default_rng((seed, *key.encode()))

    @functools.cache
    def uses_of(key):
        random = own_random(key)
        count = int(random.integers(1, 4))
        return [f"own:{key}", *random.choice(resources, size=count, replace=False).tolist()]

    @functools.cache
    def capacity(resource):
        low, high = (10, 50) if isinstance(resource, str) else (5, 60)
        return float(own_random(str(resource)).integers(low, high))

    # Machines without a symmetry: more flows never help here, and nothing else is assumed.
    return SharedResources(
        lambda flow: uses_of(str(flow)), capacity, noise=noise, seed=seed, bounds_hold=True
    )


def two_uplinks(*, uplink=10.0, port=30.0, **more):
    """Four GPUs, 0 1 and 2 3 below one switch each; hops between switches share uplinks."""

    def uses(flow):
        one, other = flow.source.index, flow.destination.index
        used = [f"out{one}", f"in{other}"]
        if one // 2 != other // 2:
            used += [f"up{one // 2}", f"down{other // 2}"]
        return used

    return SharedResources(
        uses, lambda resource: uplink if resource[:2] in ("up", "do") else port, **more
    )


class FakePool:
    """A pool without processes: lanes and copies that move as fast as they are told to.

    `rates(text, number)` are the flows' rates in GB/s in the pool's repeat `number`, of which
    checks are none; with a rate of 0 nothing moves, and a list has one for each lane. Time, which
    `clock` tells, passes only while sets run. A device's clock is `offsets_ns` ahead. `faults` are
    raised by the next runs, one each; None is none. `copies_gbps` is what copies do where that is
    not their flow's rate.
    """

    def __init__(self, rates, *, devices=2, lanes=64, run_s=0.0, skew_us=0.0):
        self.rates, self.run_s, self.skew_us = rates, run_s, skew_us
        names = [f"G{i}" for i in range(devices)]
        self.lanes = dict.fromkeys(names, lanes)
        self.offsets_ns = dict.fromkeys(names, 10**15)
        self.faults, self.wrong_packs, self.copies_gbps = [], 0, None
        self.timings, self.checked, self.restarts, self.pings, self.repeats = [], [], 0, 0, 0
        self.now_ns = 10**12

    def clock(self):
        return self.now_ns / 1e9

    def restart(self):
        self.restarts += 1

    def ping(self, count):
        self.pings += 1
        self.now_ns += 100_000_000
        asked = [self.now_ns + 5000 * i for i in range(count)]
        return {
            device: Pinged(
                asked_ns=tuple(asked),
                device_ns=tuple(t + 1000 + offset for t in asked),
                seen_ns=tuple(t + 2000 for t in asked),
            )
            for device, offset in self.offsets_ns.items()
        }

    def run(self, program, timing):
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        (self.checked if timing.check else self.timings).append(timing)
        return [self.outcome(program, timing) for _ in range(timing.repeats)]

    def outcome(self, program, timing):
        text = str(program.transfers)
        rates = [10.0] * len(program.transfers) if timing.check else self.rates(text, self.repeats)
        self.repeats += not timing.check
        self.now_ns += round(self.run_s * 1e9 + (timing.warm_us + timing.window_us) * 1e3)
        records, stamps = {}, {}
        for number, (device, share) in enumerate(program.devices.items()):
            start = self.now_ns + self.offsets_ns[device] + round(number * self.skew_us * 1e3)
            records[device] = np.zeros(len(share.lanes), RECORD)
            records[device]["start"] = start
            paces = timing.paces.get(device, ())
            stamps[device] = tuple(np.full(one.groups + 1, start, np.uint64) for one in paces)
        for rate, counted, others in zip(rates, program.counted, program.other, strict=True):
            for part in (counted, *others):
                count = len(part.numbers)
                lanes = rate if isinstance(rate, list) else [rate / count] * count
                for number, gbps in zip(part.numbers, lanes, strict=True):
                    if part.engine:
                        copied = self.copies_gbps or gbps
                        _copied(stamps[part.device][number], timing, part, number, copied)
                    else:
                        row = records[part.device][number : number + 1]
                        _moved(row, timing, part, gbps)
                        row["errors"] = self.wrong_packs
        return RunResult(records=records, stamps=stamps)


def _moved(row, timing, part, gbps):
    side = "in" if part.incoming else "out"
    first = int(row["start"][0] + round(timing.warm_us * 1e3))
    count = int(gbps * timing.window_us * 1e3 / part.slice_bytes)
    last = first + round(count * part.slice_bytes / gbps) if gbps else first
    row[f"{side}_first"], row[f"{side}_last"], row[f"{side}_count"] = first, last, count
    row["end"] = max(last, int(row["end"][0]))


def _copied(stamps, timing, part, number, gbps):
    group_bytes = part.slice_bytes * timing.paces[part.device][number].slices
    if gbps:
        stamps[:] = stamps[0] + (np.arange(len(stamps)) * group_bytes / gbps).astype(np.uint64)
    else:  # let go long after the window
        stamps[1:] = stamps[0] + np.uint64(10**10)


def scaled(answer, factor):
    """A measurement with all rates times a factor."""
    rows = tuple(tuple(factor * rate for rate in row) for row in answer.samples_gbps)
    return msgspec.structs.replace(answer, samples_gbps=rows)


class Impatient:
    """Watches a search, and presses Ctrl-C once at an update."""

    def __init__(self, at=None):
        self.at, self.updates = at, 0

    def __call__(self, progress):
        self.updates += 1
        if self.updates == self.at:
            raise KeyboardInterrupt
