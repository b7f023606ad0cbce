"""``bagua simulate``: predicted steps for other numbers of ranks and other links."""
