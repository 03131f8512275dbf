"""How a task that did not return is recorded: as a state with a sentence, like every other failure."""

from __future__ import annotations

from typing import Literal

from evoattn.evaluation.process import Ending
from evoattn.evaluation.workers import Outcome
from evoattn.model.records import CompileInfo, Evaluation, TrialState


def failed(outcome: Outcome, where: Literal["compile", "device"], info: CompileInfo | None = None) -> Evaluation:
    """The evaluation of a candidate whose task did not return: `outcome.ending` is not `Ending.RESULT`."""
    sentence, state = str(outcome.value), TrialState.LAUNCH_ERROR if where == "device" else TrialState.COMPILE_ERROR
    if outcome.ending in (Ending.TIMEOUT, Ending.DIED, Ending.LOST):
        state = TrialState.TIMEOUT if outcome.ending is Ending.TIMEOUT else TrialState.WORKER_DIED
        sentence = f"On the {where} worker: {sentence}"
    return Evaluation(state, sentence, info, seconds=outcome.seconds)
