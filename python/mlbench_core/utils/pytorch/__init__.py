"""What the other packages share, for torch."""
