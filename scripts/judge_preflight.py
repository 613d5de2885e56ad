"""Run preflights of an unchanged machine, and print the time and the findings of each.

usage: judge_preflight.py DIR [TIMES]

Without a plan in DIR this machine is planned and verified first. At most 1 of 100 may fail.
"""

import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Judge, and exit with 1 if a preflight failed or took longer than a minute."""
    directory, times = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
    if not (directory / "plan.json").exists():
        tccl("plan", directory)
        print(tccl("verify", directory, "--rounds", "6", "--seconds", "60").stdout, flush=True)
    failed = slow = 0
    for number in range(times):
        done = tccl("check", directory, "--preflight", "--json", "--seed", number)
        if done.returncode not in (0, 1):
            sys.exit(done.stderr)
        result = json.loads(done.stdout)
        failed, slow = failed + (not result["ok"]), slow + (result["seconds"] > 60)
        rates = " ".join(
            f"{row['gbps']:.1f}/{row['expected_gbps'] or 0:.1f}" for row in result["bandwidths"]
        )
        print(
            f"{number + 1}: {'ok' if result['ok'] else 'FAILED'} in {result['seconds']:.0f} s, "
            f"{result['sets_compared']} sets, {result['collectives_checked']} results, "
            f"GB/s {rates}",
            *result["findings"],
            done.stderr,
            sep="\n   ",
            flush=True,
        )
    print(f"{times} preflights: {failed} failed, {slow} took more than 60 s")
    sys.exit(bool(failed or slow))


def tccl(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    command = [sys.executable, "-m", "tccl_py.cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
