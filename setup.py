"""Build entry point: the NCCL plugin, if there is a C compiler; see pyproject.toml for the rest."""

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PLUGIN = Path(__file__).resolve().parent / "tccl_py" / "nccl" / "plugin"


class BuildWithPlugin(build_py):
    """Copy the modules, and build the plugin beside its sources: a library, no Python module."""

    def run(self):
        """Build; a host without a compiler gets everything else."""
        super().run()
        build = runpy.run_path(str(PLUGIN / "build.py"))
        folder = PLUGIN if self.editable_mode else Path(self.build_lib, "tccl_py/nccl/plugin")
        try:
            build["build_plugin"](folder)
        except build["BuildError"] as error:
            print(f"tccl: the NCCL plugin is not built: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Tag the wheel by its platform: the library in it is compiled, for any Python."""

    def finalize_options(self):
        """Keep the platform in the tag."""
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        """Return the tag for any Python 3 on this platform."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithPlugin, "bdist_wheel": PlatformWheel})
