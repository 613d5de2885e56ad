"""Kills (-9) in the midst of commands that plan and verify, after which nothing may be left.

usage: python -m tests.gpu.kills FOLDER [--kills N] [--seconds S] [--seed K] [--backend cuda|host]

Processes of each role are killed in turn, a random moment after one is there: the controller,
a worker, a rank, the server that starts ranks; below `tests/gpu/on-hosts` mpirun and the other
host's agent as well. Each kill prints a line. Exit code 1: a process, shared memory, a temporary
folder or GPU memory stayed, or the next command did not work.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu.ranks import BRIEF, PINNED, REPOSITORY, SHARE
from tests.processes import alive

MARK = "TCCL_KILLS_RUN"
HOSTS = int(os.environ.get("VGPU_HOSTS", "1"))
AGENT = str(REPOSITORY / "tests" / "gpu" / "on-hosts")
APPEARS_S, GOES_ON_S, ENDS_S, GONE_S, MEMORY_S = 60.0, 4.0, 20.0, 15.0, 20.0
MOMENTS_S = {"rank": 0.4, "worker": 3.0, "server": 3.0}
RETRIES = 4
"""Virtual GPUs are not available for a moment after a process on them was killed."""
ROLES = (("plan", ("controller", "worker")), ("verify", ("controller", "rank", "server")))
ASKED = ("plan", ("rank", "server"))
"""NCCL's ranks while it is planned: where there are GPUs."""
OVER_HOSTS = (("plan", ("mpirun", "controller", "agent", "worker")), ("verify", ("mpirun", "rank")))


class Kills:
    """Runs and their kills, each with all that it left."""

    def __init__(self, options):
        self.folder, self.host = Path(options.folder), options.backend == "host"
        self.random, self.numbers = random.Random(options.seed), itertools.count()
        self.wrong = []
        self.plan = self.folder / "plan"

    def command(self, name, place):
        """A command of `tccl`, and its variables."""
        words = {
            "plan": ["plan", place, *BRIEF, "--max-sets", "15" if HOSTS == 1 else "4"],
            "verify": ["verify", self.plan, "--sizes", "64K", "--rounds", "6", "--no-checks"],
        }[name]
        words += [*PINNED, "--seconds", "3"] if name == "verify" else []
        if self.host:
            devices = [] if name == "verify" else ["--devices", "2", "--target", "0.5"]
            words += ["--backend", "host", *devices]
        elif name == "plan" and HOSTS == 1:
            words += ["--gpus", "0,2" if _count() > 2 else "0,1"]
        if HOSTS > 1 and name == "plan":
            words += ["--interfaces", "lo", "--no-tune", "--rings", "1"]
        program = [sys.executable, "-m", "tccl_py", *map(str, words)]
        if HOSTS > 1:
            launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            program = [*launch, "-n", str(HOSTS), AGENT, "--rank", *program]
        return program, {} if name == "verify" else SHARE

    def started(self, name, place, mark):
        """Start a command; its output goes to a file beside the plans."""
        program, variables = self.command(name, place)
        with (self.folder / f"output-{mark}").open("w") as output:
            return subprocess.Popen(
                program,
                cwd=REPOSITORY,
                env={**os.environ, **variables, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def said(self, mark):
        """The end of what a command printed."""
        return (self.folder / f"output-{mark}").read_text(errors="replace")[-1500:]

    def whole(self, name, place):
        """Run a command to its end; return whether it worked."""
        mark = f"whole-{next(self.numbers)}"
        process = self.started(name, place, mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)
        worked = process.poll() in (0, 1) and (name == "verify" or process.poll() == 0)
        gone = self.gone(mark)
        if not worked:
            print(f"{name} ended with {process.poll()}: {self.said(mark)}", flush=True)
        return worked and gone

    def kill(self, name, role):
        """Start a command, kill a process of a role, and look at what is left."""
        begun, mark = time.monotonic(), f"kill-{next(self.numbers)}"
        place = self.folder / "killed"
        victim, retries = None, 0
        while victim is None and retries <= RETRIES:
            # One whose victim was never there may have ended with a plan.
            shutil.rmtree(place, ignore_errors=True)
            process = self.started(name, place, mark)
            victim = self.victim(process, role, mark)
            retries += victim is None
        if victim is None:
            self.wrong.append(f"{name}, {role}: never there: {self.said(mark)}")
            return
        time.sleep(self.random.uniform(0, MOMENTS_S.get(role, 6.0)))
        phase = self.said(mark).strip().splitlines()[-1:]
        there = alive(victim)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        at = time.monotonic()
        # A lost worker or server is replaced, and a job begun again: such commands are interrupted.
        for seconds in (GOES_ON_S, ENDS_S):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            if process.poll() is None and seconds == GOES_ON_S:
                process.send_signal(signal.SIGINT)
        ended = time.monotonic() - at
        if process.poll() is None:
            self.wrong.append(f"{name}, {role}: did not end within {ENDS_S:g} s")
            process.kill()
        gone = self.gone(mark)
        told = "Traceback" not in self.said(mark)
        if not told:
            self.wrong.append(f"{name}, {role}: {self.said(mark)}")
        line = {"command": name, "killed": role, "there": there, "code": process.poll()}
        line |= {"ended_s": round(ended, 1), "nothing_left": gone, "sentence": told}
        line |= {"retries": retries, "seconds": round(time.monotonic() - begun, 1), "at": phase}
        print(json.dumps(line), flush=True)

    def victim(self, process, role, mark):
        """Wait for a process of a role; None if the command ends before."""
        until = time.monotonic() + APPEARS_S
        while process.poll() is None and time.monotonic() < until:
            roles = _roles(mark, process.pid)
            if roles.get(role):
                return self.random.choice(sorted(roles[role]))
            time.sleep(0.02)
        process.kill()
        self.gone(mark)
        return None

    def gone(self, mark):
        """Whether all processes of a run end soon; they are ended if not."""
        until = time.monotonic() + GONE_S
        while (pids := _marked(mark)) and time.monotonic() < until:
            time.sleep(0.05)
        for pid, words in pids.items():
            self.wrong.append(f"{mark} left {pid}: {words}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids


def _marked(mark):
    """Command lines of a run's processes, by process id."""
    marked, wanted = {}, f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0") and alive(folder.name):
                text = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                marked[int(folder.name)] = text
    return marked


def _roles(mark, begun):
    """Processes of a run by role."""
    marked = _marked(mark)
    parents = {pid: _parent(pid) for pid in marked}
    roles = {}
    for pid, words in marked.items():
        above = marked.get(parents[pid], "")
        role = None
        if "tccl_profiler.worker" in words:
            role = "worker"
        elif "rank_processes.forkserver" in words:
            role = "rank" if "rank_processes.forkserver" in above else "server"
        elif "mpirun" in words.split(" -m tccl_py")[0] or "prterun" in words:
            role = "mpirun"
        elif "-m tccl_py" in words and HOSTS == 1:
            role = "controller" if pid == begun else None
        elif "-m tccl_py" in words and "nsenter" not in words:
            role = "controller" if _variable(pid, "OMPI_COMM_WORLD_RANK") == "0" else "agent"
        roles.setdefault(role, []).append(pid)
    return roles


def _parent(pid):
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _variable(pid, name):
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            key, _, text = word.decode(errors="replace").partition("=")
            if key == name:
                return text
    return None


def _count():
    from tccl_py.readers.live import gpu_count  # noqa: PLC0415 (where there are GPUs)

    return gpu_count()


def used_mib():
    """Memory in use on the fullest GPU; 0 without GPUs."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return max(map(int, shown.split()))


def files():
    """Shared memory and temporary folders of this project."""
    temporary = Path(tempfile.gettempdir()).glob("*tccl*")
    return {*Path("/dev/shm").iterdir(), *temporary}


def main():
    """Kill, print a line for each kill and one for all; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kills")
    parser.add_argument("folder")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("cuda", "host"), default="cuda")
    options = parser.parse_args()
    # The background of a shell ignores it, and commands would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    until = time.monotonic() + options.seconds
    kills = Kills(options)
    kills.folder.mkdir(parents=True, exist_ok=True)
    before = files()
    assert kills.whole("plan", kills.plan)
    memory = used_mib()
    kinds = OVER_HOSTS if HOSTS > 1 else (*ROLES, *(() if kills.host else (ASKED,)))
    cases = [(name, role) for name, roles in kinds for role in roles]
    cases = list(itertools.islice(itertools.cycle(cases), options.kills))
    done = 0
    for name, role in cases:
        if time.monotonic() > until - 30:
            break
        kills.kill(name, role)
        done += 1
    shutil.rmtree(kills.folder / "killed", ignore_errors=True)
    works = kills.whole("plan", kills.folder / "killed")
    end = time.monotonic() + MEMORY_S
    while used_mib() > memory + 16 and time.monotonic() < end:
        time.sleep(0.2)
    over = {"kills": done, "of": options.kills, "works": works, "wrong": len(kills.wrong)}
    over |= {"memory_mib": [memory, used_mib()], "files": sorted(map(str, files() - before))}
    print(json.dumps(over), *kills.wrong, sep="\n", flush=True)
    right = works and not kills.wrong and used_mib() <= memory + 16 and not over["files"]
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
