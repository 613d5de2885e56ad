"""TCCL-style path finding: fast communication rings for GPU clusters, handed to NCCL."""
