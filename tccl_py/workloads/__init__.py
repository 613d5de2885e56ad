"""Workloads: the collectives of a job's step, from logs, traces, or formulas over model shapes."""
