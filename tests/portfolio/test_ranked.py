"""In which order the kernels of a class are, for a problem."""

import math

from evoattn.cost.cost import scores
from evoattn.model.gpu import GPUS
from evoattn.portfolio.features import class_of
from evoattn.portfolio.kind_workload import draw_kind
from evoattn.portfolio.known import visible
from evoattn.portfolio.nearest import portfolios, ranked

H100 = GPUS["h100"]


def test_packed_sequences_and_keys_in_use_are_ranked_by_the_cost_model_too():
    (portfolio, *_) = portfolios(H100)
    changed = 0
    for kind in ("packed", "paged", "cached", "latent_paged", "biased"):
        for problem in draw_kind(kind, 4714, 12):
            kernels = portfolio.kernel_class(class_of(problem))
            if not kernels or len(order := list(ranked(problem, H100, kernels))) < 2:
                continue
            seen = visible(problem)
            costs = [math.prod(row) for row in zip(*(scores(one, order, H100) for one in seen), strict=True)]
            known_us = {
                config.id: us for kernel in kernels.kernels for config, us in by_constants(kernel, kernels, seen)
            }
            told = [known_us[config.id] for config in order]
            both = [us * cost for us, cost in zip(told, costs, strict=True)]
            model_counts = bool(problem.varlen or problem.seqused) and not problem.shared_kv
            assert (both if model_counts else told) == sorted(both if model_counts else told)
            changed += told != sorted(told)
    assert changed > 5, "the model never changed the order"


def by_constants(kernel, kernels, seen):
    """A kernel's configs and the products of what its class's constants say of the problems."""
    predicted = [kernel.predicted_us(one, H100, kernels.alike(one, H100)) for one in seen]
    return list(zip(kernel.variants(), map(math.prod, zip(*predicted, strict=True)), strict=True))
