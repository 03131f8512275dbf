"""A study that is ready to run, of words as `evoattn search` has them."""

from evoattn.model import gpu
from evoattn.search.request import SearchWords, plan, read_words
from evoattn.search.setup import PreparedSearch, begin_study, resume_study


def prepare_search(words: SearchWords, devices: list[gpu.DetectedDevice]) -> PreparedSearch:
    """The study that the words resume, or a new one. `devices`: those of this machine."""
    request = read_words(words)
    if request.problem is None:
        return resume_study(request, devices)
    return begin_study(request, plan(words, request.problem, devices))
