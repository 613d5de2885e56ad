"""The runtime of the TCCL fork: its database of rings and chains, and what it makes of one."""
