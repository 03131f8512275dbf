"""Hardware counters of one call, read by Nsight Compute."""
