"""Jobs of torch.distributed as fresh processes, a rank each: run and ended, and met from inside."""
