"""The parts that both doors stand on: groups of ranks, eager calls, state."""
