"""What compressed operations remember and choose."""
