"""Plan, write a directory, and open, explain and check it again.

python examples/write_and_reopen.py [DIR]     (new or empty; a temporary one by default)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import tccl_py


def main(directory: Path) -> None:
    """Write the plan of a bundled machine, then read it by Python and by commands."""
    model = tccl_py.load_machine("amd-3090")
    with tccl_py.open_source(model) as source:
        plan = tccl_py.make_plan(model.machine, model.knowledge, source)
        # What `tccl plan` writes: plan, model, measurements, and the files for NCCL.
        plan.write(directory, source)

        # What jobs get by each choice, without a directory.
        for name, choice in plan.choices.items():
            variables = " ".join(f"{key}={value}" for key, value in choice.environment.items())
            gain = plan.gain(name)
            times = "not rated" if gain is None else f"{gain:.2f}x default NCCL"
            print(f"{name}: {times} ({plan.provenance}), {variables or 'no variables'}")
            print(f"    files: {', '.join(sorted(plan.files(name, directory))[:3])}")

    again = tccl_py.load_plan(directory)
    print(f"differences: {tccl_py.diff(plan, again) or 'none'}")
    print(tccl_py.explain(again, tccl_py.Simulator(model)))
    for command in ("show --why", "check"):
        done = subprocess.run(
            [sys.executable, "-m", "tccl_py", *command.split(), directory],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        print(f"tccl {command}: {done.stdout.splitlines()[0]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else place))
