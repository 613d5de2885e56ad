"""Readers: each turns one description of a machine into a Machine, or refuses it."""
