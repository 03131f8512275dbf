"""The two bases of what a user can do wrong and of what a run can fail at.

The command line catches these two and no others.
"""


class WrongUse(ValueError):
    """A word of the user's that cannot be: its message is one sentence; exit code 2."""


class FailedRun(RuntimeError):
    """A run that cannot go on: its message is one sentence; exit code 1."""
