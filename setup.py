"""Build entry point: the NCCL plugin, if there is a C compiler; see pyproject.toml for the rest."""

import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PLUGIN = ROOT / "tccl_py" / "nccl" / "plugin"


class BuildWithPlugin(build_py):
    """Copy the modules, and build the plugin beside its sources: a library, no Python module."""

    def run(self):
        """Build; a host without a compiler gets everything else."""
        super().run()
        sys.path.insert(0, str(ROOT))
        build = runpy.run_path(str(PLUGIN / "build.py"))
        folder = PLUGIN if self.editable_mode else Path(self.build_lib, "tccl_py/nccl/plugin")
        try:
            build["build_plugin"](folder)
        except build["BuildError"] as error:
            print(f"tccl: the NCCL plugin is not built: {error}", file=sys.stderr)


class Compiled(Distribution):
    """Install into the platform's folder: the plugin is compiled."""

    def has_ext_modules(self):
        """Return True, also where there is no compiler."""
        return True


class AnyPython(bdist_wheel):
    """Tag the wheel by its platform, for any Python: the library in it is NCCL's."""

    def get_tag(self):
        """Return the tag for any Python 3 on this platform."""
        return "py3", "none", super().get_tag()[2]


# scripts/release makes the manual's pages; they are no part of a checkout.
MANUAL = [str(page.relative_to(ROOT)) for page in ROOT.glob("man/*.1")]

setup(
    cmdclass={"build_py": BuildWithPlugin, "bdist_wheel": AnyPython},
    data_files=[("share/man/man1", MANUAL)],
    distclass=Compiled,
)
