"""Process groups of torch.distributed with a plan's rings, for NCCL before 2.28.7."""

from tccl_py.torch.groups import init_process_group, new_group, split_group

__all__ = ["init_process_group", "new_group", "split_group"]
