"""Compile workers of a search: what they are sent, what comes back, and what is known where nothing does."""

import os
import pickle
import time
from contextlib import closing

import pytest

from evoattn.engine.candidates import Compilers, Pending
from evoattn.engine.tools import Tools
from evoattn.evaluation.handlers import CompileHandler
from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Compile, Compiled
from evoattn.evaluation.workers import Listener, processes
from evoattn.families.built import behaviour
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.records import CompressedSource, Evaluation, Proposal, TrialState
from tests.search.search_fakes import FakeCompiler
from tests.search.studies_of_fakes import GPU, PROBLEM, why_invalid

FAMILY = FAMILIES["flash_mma"]


class Dies(Handler):
    """Of every task."""

    def __init__(self, gpu, offline):
        pass

    def __call__(self, task):
        os._exit(3)


def pending():
    config = next(c for c in load_space(FAMILY.name, GPU).starting_configs() if not why_invalid(FAMILY.name, c.params))
    return Pending(Proposal(FAMILY.name, config.params), FAMILY, config, PROBLEM, GPU)


def cannot_render(family, problem, config, gpu):
    raise KeyError("no such tile")


def ends(make, beside=False, render=render):
    """The (candidate, answer) of one task, by one worker."""
    compilers = Compilers(processes(1, make, (GPU, False), beside), Tools(render=render))
    end, found, handed = time.monotonic() + 600, [], False
    with closing(Listener()) as listener:
        while not found and time.monotonic() < end:
            if (idle := compilers.idle()) and not handed:
                compilers.submit(pending(), idle[0])
                handed = True
            found += compilers.poll(listener.wait(compilers.workers, 0.05))
    compilers.stop()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [CompileHandler, FakeCompiler])
def test_a_config_goes_there_and_its_source_comes_back(make):
    ((candidate, answer),) = ends(make, beside=True)
    text = render(FAMILY, PROBLEM, candidate.config, GPU)
    assert candidate.source == CompressedSource.of(text)
    assert candidate.behaviour == behaviour(text.source_hash, FAMILY, PROBLEM, candidate.config, GPU)
    assert isinstance(answer, Compiled) and answer.kernel and not answer.kernel.ptx


@pytest.mark.slow
def test_the_source_of_a_candidate_whose_workers_died_is_known_all_the_same():
    ((candidate, answer),) = ends(Dies)
    assert isinstance(answer, Evaluation) and answer.state is TrialState.WORKER_DIED and candidate.again
    assert candidate.source == CompressedSource.of(render(FAMILY, PROBLEM, candidate.config, GPU))


@pytest.mark.slow
def test_a_candidate_that_cannot_be_rendered_ends_alone():
    ((candidate, answer),) = ends(CompileHandler, beside=True, render=cannot_render)
    assert (
        isinstance(answer, Evaluation) and answer.state is TrialState.COMPILE_ERROR and "no such tile" in answer.reason
    )
    assert (candidate.source, candidate.behaviour) == (None, None)


def test_a_task_is_small():
    candidate = pending()
    task = Compile(candidate.family, candidate.config, candidate.problem, render=Tools().render)
    assert len(pickle.dumps(task)) < 2_000
