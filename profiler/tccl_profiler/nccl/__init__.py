"""NCCL itself as what carries bytes from host to host, by communicators of two GPUs."""
