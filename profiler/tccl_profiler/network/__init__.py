"""NICs as devices: lanes that send slices of host memory over TCP and receive them into it."""
