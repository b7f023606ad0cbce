"""The documented classes of mlbench-core over bagua's core; users import from the leaf modules."""
