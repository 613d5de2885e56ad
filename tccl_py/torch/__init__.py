"""Process groups of torch.distributed that use a plan's rings, each its own, or stock NCCL's.

A graph file fails every communicator that does not use exactly its GPUs, and NCCL reads its name
when a communicator is made. So `init_process_group`, `new_group` and `split_group` here name the
file for exactly the group's GPUs while the group's communicator is made, or none, and leave the
environment as it was. torch is imported when they are called.
"""

from tccl_py.torch.groups import init_process_group, new_group, split_group

__all__ = ["init_process_group", "new_group", "split_group"]
