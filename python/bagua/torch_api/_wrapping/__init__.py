"""Parts of a module's wrapper."""
