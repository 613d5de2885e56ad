"""Stock NCCL: its settings, its view of a machine, and what it does with a graph file."""
