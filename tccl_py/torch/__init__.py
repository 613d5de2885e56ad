"""Process groups of torch.distributed with a plan's rings, or default NCCL's.

A graph file fails every communicator over other GPUs than the file's, and NCCL reads the file's
name when it makes a communicator. So `init_process_group`, `new_group` and `split_group` name the
file for exactly the group's GPUs, or none, while the group's communicator is made, and then restore
the environment. They import torch when called.
"""

from tccl_py.torch.groups import init_process_group, new_group, split_group

__all__ = ["init_process_group", "new_group", "split_group"]
