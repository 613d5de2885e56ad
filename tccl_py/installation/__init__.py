"""Putting a plan's settings where jobs find them, and taking them out again without trace."""
