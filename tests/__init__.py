"""The tests, and programs of theirs that one can start: faults, mutants, fuzz, golden files, cheats."""
