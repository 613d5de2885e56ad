"""A BandwidthSource over machine models: everything it answers says it is simulated."""
