"""The step loop: schedule, run, postprocess."""
