"""A BandwidthSource over machine models: every answer is marked as simulated."""
