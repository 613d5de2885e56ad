"""`tccl check`: a few sets of a plan's journal measured again, and what changed, by name."""
