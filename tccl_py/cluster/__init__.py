"""A cluster: its hosts and their classes, the switches between them, and how those are written."""
