"""What a runtime can be made to do, by which settings."""
