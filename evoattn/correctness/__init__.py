"""Whether a kernel is right: reference answers, test cases, guarded memory, verdicts."""
