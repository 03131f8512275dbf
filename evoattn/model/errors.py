"""The two bases of what a user can do wrong or a run can fail at, for errors of modules that are slow to import (torch, optuna).

The command line catches these without importing those modules: `evoattn report` would wait three seconds for torch.
"""


class WrongUse(ValueError):
    """A word of the user's that cannot be: its message is one sentence; exit code 2."""


class FailedRun(RuntimeError):
    """A run that cannot go on: its message is one sentence; exit code 1."""
