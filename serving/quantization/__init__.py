"""INT8 from outside: scales are searched for and applied to a built decoder; folders of INT8 weights are written."""
