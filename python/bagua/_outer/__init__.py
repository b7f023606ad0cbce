"""Local training: rounds at optimizer steps, in which ranks average what they have learnt."""
