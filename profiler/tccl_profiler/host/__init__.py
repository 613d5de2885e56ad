"""The host backend: cores and their memory in place of GPUs, measured by the same pool."""
