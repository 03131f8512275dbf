"""The scheduler, block barriers, counters; one launch from start to end."""
