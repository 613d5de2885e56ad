"""Delivery of a plan: whether it fits a host, and what a job there gets from it."""
