"""Measurements of transfer sets, where they come from and where they are kept."""
