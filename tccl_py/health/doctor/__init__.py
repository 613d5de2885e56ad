"""`tccl doctor`: what on a host will hang NCCL or spoil measurements; it only reads."""
