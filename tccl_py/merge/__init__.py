"""Joins the chains of nodes to rings over nodes, by the network crossings between them."""
