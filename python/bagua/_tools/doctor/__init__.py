"""``bagua doctor``: finds the broken link, version or setting of a cluster."""
