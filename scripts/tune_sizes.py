"""Tune a plan of this machine by message size, print all rows, and keep them as JSON.

usage: python scripts/tune_sizes.py DIR [--out FILE] [--others] [--seconds S] [--backend host]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tccl_py.cli.options import parse_sizes
from tccl_py.experiments.jobs import Launcher
from tccl_py.experiments.plans import launcher_of
from tccl_py.experiments.size_table import SWEPT
from tccl_py.experiments.sizes import ALL_SIZES, FURTHER, arms_of, plugin_library, tune_sizes
from tccl_py.experiments.spec import rows_of
from tccl_py.experiments.target import read_target
from tccl_py.plan.load import load_plan
from tccl_py.report.sizes import SIZES, entry_lines, tuning_facts
from tccl_py.report.tables import lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--others", action="store_true", help="all collectives but all-reduce")
    parser.add_argument("--seconds", type=float, default=200.0, help="no fresh jobs after this")
    parser.add_argument("--sizes")
    parser.add_argument("--backend", default="cuda")
    options = parser.parse_args()
    plan = load_plan(options.directory)
    sizes = ALL_SIZES[::2] if options.others else ALL_SIZES
    if options.sizes:
        sizes = parse_sizes(options.sizes)
    asked_for = Launcher(
        backend=options.backend,
        keep=tuple(plan.pinned_env),
        say=print,
        watch=lambda text: print(text, file=sys.stderr),
    )
    with (
        launcher_of(plan, options.directory, asked_for) as launcher,
        tempfile.TemporaryDirectory() as folder,
    ):
        library = plugin_library(Path(folder)) if options.backend == "cuda" else None
        arms = arms_of(read_target(plan, options.directory), library, plan.gpus)
        collectives = FURTHER if options.others else ("all_reduce",)
        rows = rows_of(sizes, collectives, SWEPT)
        tuning, sweep = tune_sizes(launcher, arms, rows, options.seconds)
    if options.out:
        options.out.write_bytes(msgspec.json.encode({"tuning": tuning, "sweep": sweep}))
    for names, *rows in (list(lines(SIZES, tuning.rows)), entry_lines([tuning])):
        table = Table(*names)
        for cells in rows:
            table.add_row(*cells)
        Console(width=160).print(table)
    print(*tuning_facts(tuning), sep="\n")


if __name__ == "__main__":
    main()
