"""The multi-process profiler; it knows transfers and measurements, and no ring."""
