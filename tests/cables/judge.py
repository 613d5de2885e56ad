"""Released NCCL over hosts of one GPU that cables join: which function each connection uses.

    judge.py FOLDER [CASE...]      run on each pretended host (VGPU_HOST of VGPU_HOSTS)

FOLDER, which all hosts share, has the net plugin and gets logs and results; host 0 prints a table
of each case. Torch is loaded once; each case is a forked process a host.
"""

import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from network import NAMES, PORTS, ring_cables, write_cables

HOST, HOSTS = int(os.environ.get("VGPU_HOST", "0")), int(os.environ.get("VGPU_HOSTS", "1"))
LIMIT = 14
"""Seconds of a case."""
AWARE = {"NCCL_IB_SUBNET_AWARE_ROUTING": "1", "NCCL_CROSS_NIC": "1"}
RING = {**AWARE, "NCCL_ALGO": "Ring"}


def cable(a, x, b, y):
    """A cable between ports, function by function."""
    return [(a, out, b, into) for out, into in zip(PORTS[x], PORTS[y], strict=True)]


MIRRORED = cable(0, 0, 1, 0) + cable(1, 1, 2, 1) + cable(2, 0, 0, 1)
DOUBLED = cable(0, 0, 1, 1) + cable(0, 1, 1, 0)


def hand_made(_host):
    """The public file of three hosts."""
    channels = [(0, 1), (2, 3)] * 4
    return f'<graphs version="1">{graph(0, 4, channels, 0.24)}</graphs>\n'


def own(*enter_by):
    """Files that say what each host enters and leaves by: a port of entry for each host."""

    def text(host):
        into = enter_by[host]
        channels = [(PORTS[into][n], PORTS[1 - into][n]) for n in (0, 1)] * 2
        return both(channels)

    return text


def both(channels):
    tree = [(enter, enter) for enter, _ in channels]
    return f'<graphs version="1">{graph(0, 4, channels, 6)}{graph(1, 3, tree, 6)}</graphs>\n'


def crossed(_host):
    """Two hosts with two cables, both used both ways."""
    return both([(0, 1), (1, 0), (2, 3), (3, 2)])


def graph(number, pattern, channels, speed):
    parts = "".join(
        f'<channel><net dev="{a}"/><gpu dev="0"/><net dev="{b}"/></channel>' for a, b in channels
    )
    return (
        f'<graph id="{number}" pattern="{pattern}" crossnic="1" nchannels="{len(channels)}" '
        f'speedintra="{speed}" speedinter="{speed}" latencyinter="0" typeintra="LOC" '
        f'typeinter="P2C" samechannels="1">{parts}</graph>'
    )


# Name: hosts, cables, file of a host, variables, further steps.
CASES = {
    "hand-made, entering by port 0": (3, ring_cables(3, 1), hand_made, RING, ["pairs"]),
    "hand-made, entering by port 1": (3, ring_cables(3, 0), hand_made, RING, []),
    "own, entering by port 1": (3, ring_cables(3, 0), own(1, 1, 1), RING, ["pairs"]),
    "own, mirrored": (3, MIRRORED, own(1, 0, 1), RING, ["pairs"]),
    "own, ring of 4": (4, ring_cables(4), own(1, 1, 1, 1), RING, ["pairs", "opposite"]),
    "own, two hosts": (2, DOUBLED, crossed, RING, ["pairs"]),
    "no file": (3, ring_cables(3), None, AWARE, ["pairs"]),
    "no file, mirrored": (3, MIRRORED, None, AWARE, []),
    "own, all algorithms": (3, ring_cables(3), own(1, 1, 1), AWARE, ["pairs"]),
    "hand-made, mirrored": (3, MIRRORED, hand_made, RING, []),
    "own, without subnets": (3, ring_cables(3), own(1, 1, 1), {"NCCL_ALGO": "Ring"}, []),
    "own, ring of 4, all algorithms": (4, ring_cables(4), own(1, 1, 1, 1), AWARE, []),
    "own, ring of 4, all connected at once": (
        4, ring_cables(4), own(1, 1, 1, 1), {**RING, "NCCL_RUNTIME_CONNECT": "0"}, [],
    ),
    "own, 3 hosts, all connected at once": (
        3, ring_cables(3), own(1, 1, 1), {**RING, "NCCL_RUNTIME_CONNECT": "0"}, [],
    ),
}  # fmt: skip


def rank(world, steps):
    """Run collectives as rank HOST; print a line for each."""
    import torch  # noqa: PLC0415 (slow, and the tests have none)
    import torch.distributed as dist  # noqa: PLC0415

    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    began = time.monotonic()
    dist.init_process_group("nccl", rank=HOST, world_size=world, device_id=device)

    def told(name, came, right):
        torch.cuda.synchronize()
        same = bool((came == right).all())
        print(f"  rank {HOST}: {name} {'right' if same else 'WRONG'}", flush=True)

    print(f"  rank {HOST}: connected after {time.monotonic() - began:.1f} s", flush=True)
    for size in (1024, 1 << 20, 16 << 20):
        n = size // 4 // world * world
        part = n // world
        x = torch.full((n,), HOST + 1.0, device=device)
        dist.all_reduce(x)
        told(f"all-reduce {size}", x, world * (world + 1) / 2)
        mine = torch.arange(n, device=device, dtype=torch.float32) % 997 + 1000 * HOST
        base = mine - 1000 * HOST
        every = torch.empty(n * world, device=device)
        dist.all_gather_into_tensor(every, mine)
        told(f"all-gather {size}", every, torch.cat([base + 1000 * r for r in range(world)]))
        few = torch.empty(part, device=device)
        dist.reduce_scatter_tensor(few, mine)
        own_part = base[HOST * part : (HOST + 1) * part] * world + 500 * world * (world - 1)
        told(f"reduce-scatter {size}", few, own_part)
        dist.broadcast(mine, world - 1)
        told(f"broadcast {size}", mine, base + 1000 * (world - 1))
    for step in steps:
        for far in {"pairs": (1, -1), "opposite": (2,)}[step]:
            mine, came = (torch.full((1000,), value, device=device) for value in (HOST + 1.0, 0.0))
            pair = [
                dist.P2POp(dist.isend, mine, (HOST + far) % world),
                dist.P2POp(dist.irecv, came, (HOST - far) % world),
            ]
            for one in dist.batch_isend_irecv(pair):
                one.wait()
            told(f"send to rank +{far}", came, (HOST - far) % world + 1)
    os._exit(0)


def run(folder, number, name):
    """Run a case on this host; return the child's result."""
    hosts, cables, file, variables, steps = CASES[name]
    place = folder / str(number)
    place.mkdir(exist_ok=True)
    if hosts <= HOST:
        return "idle"
    os.environ |= {
        "CABLES_FILE": str(write_cables(place / f"cables{HOST}", cables)),
        "CABLES_HOST": str(HOST),
        "CABLES_NAMES": ",".join(NAMES),
        "CABLES_LOG": str(place / "connections"),
        "NCCL_NET_PLUGIN": str(folder / "libnccl-net-cables.so"),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV,NET,TUNING",
        "NCCL_DEBUG_FILE": str(place / f"nccl.{HOST}"),
        "NCCL_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29600 + number),
        **variables,
    }
    if file is not None:
        os.environ["NCCL_GRAPH_FILE"] = str(place / f"graph{HOST}.xml")
        (place / f"graph{HOST}.xml").write_text(file(HOST))
    try:
        rank(hosts, steps)
    except Exception as error:
        print(f"  rank {HOST}: {type(error).__name__}: {str(error)[:700]}", flush=True)
    os._exit(1)


def report(place):
    """Print what NCCL asked for and what the plugin did."""
    text = "\n".join(path.read_text(errors="replace") for path in sorted(place.glob("nccl.*")))
    lines = re.findall(
        r"Channel (\d+)/(\d+) : (\d+)\[\d+\] -> (\d+)\[\d+\] (\S+) via (NET/\S+)", text
    )
    channels = {}
    for channel, index, source, sink, way, net in lines:
        key = f"{source}->{sink} {way} {net} connection {index}"
        channels.setdefault(key, []).append(int(channel))
    for key, numbers in sorted(channels.items()):
        print(f"  NCCL: {key}: channels {sorted(set(numbers))}")
    log = place / "connections"
    for line, times in sorted(
        Counter(log.read_text().splitlines() if log.exists() else []).items()
    ):
        print(f"  plugin: {line}  x{times}")
    for line in sorted(
        set(re.findall(r"(?:WARN|NCCL INFO Search \d|Pattern \d|loaded from XML).*", text))
    )[:8]:
        print(f"  log: {line[:200]}")


def main():
    import torch  # noqa: PLC0415 (before the cases, which then need not load it)

    folder = Path(sys.argv[1])
    began = time.monotonic()
    chosen = sys.argv[2:] or list(CASES)
    if HOST == 0:
        print(f"NCCL {torch.cuda.nccl.version()}, torch {torch.__version__}", flush=True)
    for number, name in enumerate(chosen):
        if HOST == 0:
            print(f"== {name} at {time.monotonic() - began:.0f} s", flush=True)
        child = os.fork()
        if not child:
            run(folder, number, name)
            os._exit(0)
        until = time.monotonic() + LIMIT
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > until:
                print(f"  rank {HOST}: ended by the judge after {LIMIT} s", flush=True)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.05)
        (folder / f"done.{number}.{HOST}").touch()
        while len(list(folder.glob(f"done.{number}.*"))) < HOSTS:
            time.sleep(0.05)
        if HOST == 0:
            report(folder / str(number))
            sys.stdout.flush()
        (folder / f"told.{number}.{HOST}").touch()
        while len(list(folder.glob(f"told.{number}.*"))) < HOSTS:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
