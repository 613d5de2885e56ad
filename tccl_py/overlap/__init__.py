"""Transfers beside transfers, and beside a matrix product: by NCCL and by plain copies."""
