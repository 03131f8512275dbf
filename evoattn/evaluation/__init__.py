"""A candidate from its config to its verdict, and the worker processes in which that happens."""
