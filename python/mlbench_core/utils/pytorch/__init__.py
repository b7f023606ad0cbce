"""Functions that the other packages share, for torch."""
