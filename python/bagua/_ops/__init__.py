"""Bucket operations, one a file."""
