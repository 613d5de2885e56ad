"""Measuring across hosts: a controller, an agent on each host, and what they say."""
