"""The NCCL plugin: a C library that gives each communicator the graph file of its GPUs."""
