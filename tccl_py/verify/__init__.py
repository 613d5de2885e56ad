"""Real collectives by default NCCL and by each choice of a plan: correct, faster, same rings."""
