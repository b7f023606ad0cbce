"""What the other packages share."""
