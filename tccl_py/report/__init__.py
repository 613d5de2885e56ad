"""The report: a plan's directory as one HTML file that needs nothing else."""
