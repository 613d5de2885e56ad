"""Experiments: rows of real collectives in A/B arms, in interleaved rounds of fresh processes."""
