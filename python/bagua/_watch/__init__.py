"""Statistics of running modules: per step, for Prometheus, and published for ``bagua top``."""
