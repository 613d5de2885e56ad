"""Chains through one node, between the NICs by which a ring over nodes enters and leaves it."""
