"""The job, groups of ranks, and their connections."""
