"""How a search ends that cannot go on."""

from evoattn.model.errors import FailedRun


class SearchError(FailedRun):
    """The search cannot go on: its message is one sentence."""
