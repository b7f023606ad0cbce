"""Local training: rounds at optimizer steps, in which ranks average their weight changes."""
