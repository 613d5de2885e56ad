"""Pools that stand for hosts, in one process: what a cluster does with them, without messages."""

import contextlib

from tccl_profiler.cluster.agent import take_step
from tccl_profiler.cluster.agents import ClusterPool
from tccl_profiler.compiler import program_for
from tccl_profiler.linux import cpus_of_devices, host_machine
from tccl_profiler.messages import DeviceSpec, LinkStep
from tccl_profiler.pool import Pool, RunResult, Timeouts
from tests.profiler_pools import SMALL

LINK_S = 2.0
PATIENCE = Timeouts(start_s=60.0, answer_s=20.0, lanes_s=8.0, stop_s=3.0)


def host_pool(gpus, addresses, host="h0", **more):
    """A pool of the host backend with cores as GPUs, and a NIC for each address."""
    machine = host_machine(max(2, gpus))
    cpus = cpus_of_devices(machine)
    specs = [DeviceSpec(device=f"{host}.G{i}", cpus=cpus[i]) for i in range(gpus)]
    specs += [
        DeviceSpec(device=f"{host}.N{i}", address=address, interface="lo", network="tcp")
        for i, address in enumerate(addresses)
    ]
    numa_ids = {f"{host}.C{node.index}": node.numa_id for node in machine.numa_nodes}
    return Pool("host", specs, numa_ids, **{"memory": SMALL, "timeouts": PATIENCE, **more})


def step(pool, name, ends=(), limit_s=LINK_S):
    """A step for links, or for links with their endpoints; the links and endpoints after it."""
    ends = ends if isinstance(ends, dict) else dict.fromkeys(ends)
    return take_step(pool, LinkStep(step=name, ends=ends, limit_s=limit_s))


class Hosts:
    """Several pools by their hosts' names; runs programs that span them."""

    def __init__(self, pools):
        self.pools = pools
        self.cluster = ClusterPool(self, {}, {})
        self.made = []
        self.relay = lambda link, end: end
        self.between = lambda stage, repeat: None

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            for pool in self.pools.values():
                stack.enter_context(pool)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.close()

    @property
    def lanes(self):
        return {name: count for pool in self.pools.values() for name, count in pool.lanes.items()}

    def ping(self, count=16):
        """All are on one host, so no clock differs."""
        pings = [pool.ping(count) for pool in self.pools.values()]
        return {name: pinged for one in pings for name, pinged in one.items()}

    def restart(self):
        for pool in self.pools.values():
            pool.restart()

    def program(self, transfers, **more):
        return program_for(transfers, lanes=self.lanes, network="tcp", **more)

    def ask(self, method, given):
        """Take a step for links at all hosts, as their agents do."""
        answers = {}
        for host, (link_step,) in given.items():
            ends = step(self.pools[host], link_step.step, link_step.ends)
            if link_step.step == "listen":
                ends = {link: self.relay(link, end) for link, end in ends.items()}
                self.made += ends
            answers[host] = ends
        return answers

    def missing(self, program):
        return self.cluster.missing_links(program)

    def run(self, program, timing):
        """All repeats; each is released on one host after the other."""
        self.cluster.connect(program)
        outcomes = []
        with contextlib.ExitStack() as stack:
            running = {
                host: stack.enter_context(self.pools[host].begin(program.on(host), timing))
                for host in program.hosts
            }
            for repeat in range(timing.repeats):
                for one in running.values():
                    one.wait_resident(repeat)
                for one in running.values():
                    one.release(repeat)
                self.between("released", repeat)
                outcomes.append(RunResult.join([one.collect(repeat) for one in running.values()]))
            for one in running.values():
                one.finish()
        return outcomes
