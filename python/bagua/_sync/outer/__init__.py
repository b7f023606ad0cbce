"""Local training: rounds at optimizer steps, of what the ranks have learnt since the last one."""
