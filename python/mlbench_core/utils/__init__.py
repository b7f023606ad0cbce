"""Functions that the other packages share."""
