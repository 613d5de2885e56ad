"""Fitness of a host for NCCL, and drift of a machine since its plan was measured."""
