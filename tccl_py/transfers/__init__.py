"""Transfers, flows, sets of them, and the hops and rings made of them."""
