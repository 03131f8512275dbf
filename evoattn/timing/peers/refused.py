"""Why a peer does not stand beside ours."""

from __future__ import annotations


class PeerRefused(RuntimeError):
    """A peer is absent, does not take the problem, or answers wrong: the message says which, in one sentence."""
