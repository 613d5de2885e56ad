"""The kernels that move and time data, and what compiles them."""
