"""What ends a straight run of instructions."""


class Ending:
    """An instruction that the scheduler itself acts on: a branch, an exit, a wait. Each kind is a class of its own."""
