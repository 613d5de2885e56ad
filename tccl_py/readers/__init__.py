"""Readers of machines, host lists and switches, from files or from this host."""
