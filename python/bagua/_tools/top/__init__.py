"""``bagua top``: a live table of a running job."""
