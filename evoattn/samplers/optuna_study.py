"""Optuna kept in memory and kept quiet."""

import optuna


def new_study(sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """A study that minimises, held in memory: the database of `evoattn.storage` is the one that lasts."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=sampler)
