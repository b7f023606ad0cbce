"""Residuals, matrices and selections of compressed operations."""
