"""Residuals of what algorithms have sent."""
