"""NCCL's rules: settings, transports, its graph search, and the files it reads and writes."""
