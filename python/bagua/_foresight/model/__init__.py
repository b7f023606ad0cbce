"""The parts of the cost model: buckets, operations, messages, and the clock."""
