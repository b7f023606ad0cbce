"""What a wrapped module runs on."""
