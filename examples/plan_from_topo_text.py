"""A plan from the text of `nvidia-smi topo -m` alone, with every assumption listed.

python examples/plan_from_topo_text.py [FILE [OUT.json]]     (a made-up two-socket box by default)

The text has no rates and no link speeds. All assumptions are below; replace them by your knowledge
of the machine. P2P and GPU names come from the output of `nvidia-smi topo -p2p r` and `nvidia-smi
-L`, if you paste it into FILE too. The plan is a guess, and marked as a guess.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

import tccl_py
from tccl_py.model.machine import Knowledge, Machine, PciLink
from tccl_py.readers.nvidia_smi import read_nvidia_smi
from tccl_py.simulator.descriptions import model_for

LINK = PciLink(speed_gts=16.0, width=16)  # PCIe 4.0 x16
CAPABILITY = 86  # sm 8.6, as an RTX 3090's


def completed(machine: Machine) -> Machine:
    """Return the machine with the facts missing from the text."""
    gpus = tuple(msgspec.structs.replace(gpu, link=LINK, sm=CAPABILITY) for gpu in machine.gpus)
    return msgspec.structs.replace(machine, gpus=gpus)


def assumptions(machine: Machine, knowledge: Knowledge) -> list[str]:
    """Return the assumptions as sentences for the plan's notices."""
    return [
        f"every GPU's link is {LINK.speed_gts:g} GT/s x{LINK.width}",
        f"every GPU has compute capability {CAPABILITY / 10}",
        *knowledge.assumptions(machine),
        "bridges lie as the smallest PCI tree that has these relations; NODE is taken as PHB",
        "capacities follow from link speeds; no pair of transfers collapses",
    ]


def main(text: Path, output: Path | None) -> None:
    """Plan, and print the plan with its assumptions."""
    machine, knowledge = read_nvidia_smi(text)
    machine = completed(machine)
    source = tccl_py.Simulator(model_for(machine, knowledge))
    plan = tccl_py.make_plan(machine, knowledge, source)
    # Notices stay with the plan: `tccl show` prints them, and plan.json keeps them.
    notices = (*plan.notices, *(f"assumed: {one}" for one in assumptions(machine, knowledge)))
    plan = msgspec.structs.replace(plan, notices=notices)

    for ring in plan.rings:
        print(f"ring {ring.gpus}: {ring.rate_gbps:.2f} GB/s, {plan.provenance}")
    print(f"together {plan.rate_gbps:.2f} GB/s, {plan.provenance}")
    for notice in plan.notices:
        print(notice)
    if output is not None:
        plan.save(output)
        print(f"wrote {output}")


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    main(
        given[0] if given else Path(__file__).parent / "topo-m.txt",
        given[1] if len(given) > 1 else None,
    )
