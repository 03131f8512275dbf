"""evoattn: finds the fastest attention kernel for the GPU and the shapes that a user has."""

__version__ = "0.1.0"
