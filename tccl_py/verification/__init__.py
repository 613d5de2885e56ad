"""Real collectives with and without a plan: are they right, which is faster, whose rings run."""
