"""Prints the lowest version on the package index of each dependency, and of tools for tests.

Arguments name the tools, of the extra `test`. Needs Python 3.11 and pip.
"""

import re
import subprocess
import sys
from pathlib import Path

import tomllib
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.version import Version


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    tools = {one.name: one for one in map(Requirement, project["optional-dependencies"]["test"])}
    for one in (*map(Requirement, project["dependencies"]), *map(tools.get, sys.argv[1:])):
        print(f"{one.name}=={lowest(one)}", flush=True)


def lowest(requirement: Requirement) -> Version:
    command = [sys.executable, "-m", "pip", "index", "versions", requirement.name]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = re.findall(r"^Available versions: (.*)$", told, re.M)
    return min(filter(requirement.specifier.contains, map(Version, line.split(", "))))


if __name__ == "__main__":
    main()
