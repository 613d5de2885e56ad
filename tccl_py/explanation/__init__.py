"""Which transfers of a plan's rings, and of stock NCCL's, hurt which."""
