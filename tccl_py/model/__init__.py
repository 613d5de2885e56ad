"""Data that every package shares: machines, clusters, transfers, rings and measurements."""
