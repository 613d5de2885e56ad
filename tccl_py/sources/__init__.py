"""BandwidthSources: the profiler, a journal, a cache, and how to open them."""
