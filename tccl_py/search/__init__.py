"""Searches for rings and ring sets; they know no GPU, no file and no MPI."""
