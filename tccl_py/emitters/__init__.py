"""Emitters translate a plan into the files a runtime loads; they decide nothing."""
