"""The `tccl` command."""
