"""Released NCCL over hosts of one GPU that cables join: which function each connection uses.

    judge.py FOLDER [CASE...]

It runs on each of 8 pretended hosts (VGPU_HOST of VGPU_HOSTS), with the topology `host.xml`.

FOLDER, which all hosts share, is made by `tests.cables.cases`, and gets logs. Host 0 prints a line
for each case: right where all values are right and each connection of NCCL goes over the functions
that the plan's files name. A case without hops is right where NCCL fails and names two functions.
Torch is loaded once; each case is a forked process a host.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

NAMES = "rocep1s0f0,rocep1s0f1,roceP2p1s0f0,roceP2p1s0f1"
HOST, HOSTS = int(os.environ.get("VGPU_HOST", "0")), int(os.environ.get("VGPU_HOSTS", "1"))
LIMIT = 14
"""Seconds of a case."""


def collectives(world):
    """Run collectives as rank HOST, and print a line for each whose values are wrong."""
    import torch  # noqa: PLC0415 (slow, and the tests have none)
    import torch.distributed as dist  # noqa: PLC0415

    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    wrong = []
    dist.init_process_group("nccl", rank=HOST, world_size=world, device_id=device)

    def check(name, came, right):
        torch.cuda.synchronize()
        same = bool((came == right).all())
        if not same:
            print(f"  rank {HOST}: {name} is wrong", flush=True)
            wrong.append(name)

    for size in (1024, 1 << 20, 16 << 20):
        n = size // 4 // world * world
        part = n // world
        x = torch.full((n,), HOST + 1.0, device=device)
        dist.all_reduce(x)
        check(f"all-reduce {size}", x, world * (world + 1) / 2)
        mine = torch.arange(n, device=device, dtype=torch.float32) % 997 + 1000 * HOST
        base = mine - 1000 * HOST
        every = torch.empty(n * world, device=device)
        dist.all_gather_into_tensor(every, mine)
        check(f"all-gather {size}", every, torch.cat([base + 1000 * r for r in range(world)]))
        few = torch.empty(part, device=device)
        dist.reduce_scatter_tensor(few, mine)
        own_part = base[HOST * part : (HOST + 1) * part] * world + 500 * world * (world - 1)
        check(f"reduce-scatter {size}", few, own_part)
        dist.broadcast(mine, world - 1)
        check(f"broadcast {size}", mine, base + 1000 * (world - 1))
    # Others may still be sending what they have in their buffers.
    dist.barrier()
    torch.cuda.synchronize()
    time.sleep(0.3)
    os._exit(bool(wrong))


def run(folder, place, case, number):
    """Run a case as this host's child process."""
    cables = "".join("{} {} {} {}\n".format(*cable) for cable in case["cables"])
    (place / f"cables{HOST}").write_text(cables)
    os.environ |= {
        "CABLES_FILE": str(place / f"cables{HOST}"),
        "CABLES_HOST": str(HOST),
        "CABLES_NAMES": NAMES,
        "CABLES_LOG": str(place / "connections"),
        "NCCL_NET_PLUGIN": str(folder / "libnccl-net-cables.so"),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,ENV,NET",
        "NCCL_DEBUG_FILE": str(place / f"nccl.{HOST}"),
        "NCCL_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29600 + number),
        **case["variables"],
    }
    if case["folder"]:
        os.environ["NCCL_GRAPH_FILE"] = str(folder / case["folder"] / f"{HOST}.xml")
    try:
        collectives(case["hosts"])
    except Exception as error:
        reason = str(error).strip().splitlines()
        (place / f"error{HOST}").write_text(f"{type(error).__name__}: {reason[-1]}")
    os._exit(1)


def verdict(place, case, codes):
    """Return why a case is not right, "" if it is."""
    log = place / "connections"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    sends = [[int(word) for word in line[1:]] for line in lines if line[0] == "send"]
    used = sorted({(host, out, far, into) for host, _, out, far, into in sends})
    hops = sorted(map(tuple, case["hops"]))
    refused = [line for line in lines if line[0] == "refused"]
    if not hops:
        named = any("no cable joins" in one.read_text() for one in place.glob("error*"))
        return "" if named and any(codes) else f"does not fail by name: exit codes {codes}"
    if any(codes):
        errors = [one.read_text()[:300] for one in sorted(place.glob("error*"))]
        return f"exit codes {codes}: {errors}"
    text = logged(place)
    loaded = re.findall(r"Search 0 : (\d+) channels loaded from XML graph", text)
    if case["folder"] and len(loaded) != case["hosts"]:
        return f"{len(loaded)} of {case['hosts']} files were loaded"
    if case["channels"] not in (0, *channels_in(text)):
        return f"{channels_in(text)} channels, planned {case['channels']}"
    return "" if used == hops and not refused else f"used {used}, planned {hops}, {refused}"


def logged(place):
    return "".join(log.read_text(errors="replace") for log in place.glob("nccl.*"))


def channels_in(text):
    """Return the final numbers of channels of ranks."""
    return sorted({int(count) for count in re.findall(r"(\d+) coll channels", text)})


def version_of(folder):
    """Return the version that NCCL's log names: torch tells what it was built for."""
    text = "".join(map(logged, folder.glob("run*")))
    return next(iter(re.findall(r"NCCL version ([0-9.]+)", text)), "unknown")


def wait(folder, name):
    """Wait until all hosts are here."""
    (folder / f"{name}.{HOST}").touch()
    while len(list(folder.glob(f"{name}.*"))) < HOSTS:
        time.sleep(0.02)


def main():

    folder = Path(sys.argv[1])
    cases = json.loads((folder / "cases.json").read_text())
    chosen = [one for one in cases if not sys.argv[2:] or one["name"] in sys.argv[2:]]
    wrong = 0
    for number, case in enumerate(one for one in chosen if one["hosts"] <= HOSTS):
        place = folder / f"run{number}"
        place.mkdir(exist_ok=True)
        wait(folder, f"begin{number}")
        began, code = time.monotonic(), 0
        if case["hosts"] > HOST:
            child = os.fork()
            if not child:
                run(folder, place, case, number)
            ended = (0, 0)
            while not ended[0] and time.monotonic() < began + LIMIT:
                time.sleep(0.05)
                ended = os.waitpid(child, os.WNOHANG)
            if not ended[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(ended[1]) if ended[0] else "killed"
        (place / f"code{HOST}").write_text(json.dumps(code))
        wait(folder, f"end{number}")
        if HOST == 0:
            codes = [json.loads((place / f"code{host}").read_text()) for host in range(HOSTS)]
            why = verdict(place, case, codes)
            wrong += bool(why)
            seconds = time.monotonic() - began
            channels = "/".join(map(str, channels_in(logged(place)))) or "no"
            said = f"{why or 'right'} ({channels} channels, {seconds:.1f} s)"
            print(f"{case['name']}: {said}", flush=True)
        # The GPU's server lets no new process in while it ends a failed one.
        time.sleep(0.5 if case["hops"] else 3)
    if HOST == 0:
        print(f"NCCL {version_of(folder)}: {len(chosen)} cases, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
