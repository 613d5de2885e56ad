"""Build entry point; everything declarative lives in pyproject.toml."""

from setuptools import setup

setup()
