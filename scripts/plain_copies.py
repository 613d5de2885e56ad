"""Plain copy-engine loops with cupy, for comparison with the profiler.

usage: python scripts/plain_copies.py SET...

One process, one stream a transfer, 256 MB buffers in pinned host memory, median of five loops; the
loops of a set are queued one after the other, without a common start. Prints JSON: set -> GB/s.
"""

import json
import sys
import time

import cupy
import numpy as np

BYTES = 256 * 1000 * 1000
COPIES = 12
REPEATS = 5


def main():
    places = {}
    rates = {}
    let_gpus_talk()
    for text in sys.argv[1:]:
        transfers = [part.split("->") for part in text.split()]
        rows = [loop(transfers, places) for _ in range(REPEATS)]
        rates[text] = [float(np.median(row)) for row in zip(*rows, strict=True)]
    print(json.dumps(rates))


def let_gpus_talk():
    """Enable peer access; without it copies between GPUs are staged in host memory."""
    count = cupy.cuda.runtime.getDeviceCount()
    for gpu in range(count):
        with cupy.cuda.Device(gpu):
            for peer in range(count):
                if gpu != peer and cupy.cuda.runtime.deviceCanAccessPeer(gpu, peer):
                    cupy.cuda.runtime.deviceEnablePeerAccess(peer)


def memory(places, name, use):
    """Return the buffer for one use of a place."""
    key = (name, use)
    if key not in places:
        if name[0] == "C":
            places[key] = cupy.cuda.alloc_pinned_memory(BYTES)
        else:
            with cupy.cuda.Device(int(name[1:])):
                places[key] = cupy.zeros(BYTES, cupy.uint8).data
    return places[key].ptr


def loop(transfers, places):
    runtime = cupy.cuda.runtime
    queued = []
    for number, (source, engine, destination) in enumerate(transfers):
        device = int(engine[1:])
        of = memory(places, source, (number, "from"))
        to = memory(places, destination, (number, "to"))
        with cupy.cuda.Device(device):
            queued.append((device, to, of, cupy.cuda.Stream(non_blocking=True)))
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            queued[-1] += (begin, end)
    for device, to, of, stream, begin, end in queued:
        with cupy.cuda.Device(device):
            begin.record(stream)
            for _ in range(COPIES):
                runtime.memcpyAsync(to, of, BYTES, 4, stream.ptr)
            end.record(stream)
    rates = []
    for device, _, _, stream, begin, end in queued:
        with cupy.cuda.Device(device):
            stream.synchronize()
            rates.append(COPIES * BYTES / cupy.cuda.get_elapsed_time(begin, end) / 1e6)
    time.sleep(0.01)
    return rates


if __name__ == "__main__":
    main()
