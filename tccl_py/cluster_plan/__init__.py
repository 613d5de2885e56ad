"""Plans for clusters: chains of every class of nodes, merged to rings over all hosts."""
