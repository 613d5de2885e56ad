"""Explanations: the smallest slow transfer sets of a plan's rings and of default NCCL's."""
