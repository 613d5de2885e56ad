"""Whether a host is fit for NCCL, and whether a machine is still what its plan was measured on."""
