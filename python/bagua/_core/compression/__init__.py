"""What compressed operations send of a bucket: matrices, or the largest elements."""
