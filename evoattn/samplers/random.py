"""Uniform over the families, then over the valid configs of the one chosen."""

from evoattn.samplers.base import ProposingSampler


class RandomSampler(ProposingSampler):
    """Draws until a config is valid and new. The yardstick for the others."""
