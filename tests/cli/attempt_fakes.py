"""GPU workers of `test_try` that run nothing. They import no torch, so that they start at once."""

import os

from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Inspect
from evoattn.model.records import CheckResult, Evaluation, Timing, TrialState, ValidationReport


class Right(Handler):
    """Every kernel is right and takes 12.5 µs."""

    def __init__(self, problem, gpu, cache):
        pass

    def __call__(self, task):
        report = ValidationReport("cuda", (CheckResult("ragged", True, 0.0, 1.0),) * 3)
        return Evaluation(
            TrialState.COMPLETE, "", None, report, (Timing((11.5, 12.0, 12.3, 12.5, 12.5, 12.5, 12.7, 13.0, 15.5), {}),)
        )


class Wrong(Right):
    """Every kernel is wrong at the same element."""

    def __call__(self, task):
        self.broken = True
        if isinstance(task, Inspect):
            return "In the case 'ragged': the first wrong element is o[0, 0, 0, 0]."
        return Evaluation(TrialState.WRONG_RESULT, "two runs differ.")


class Dies(Right):
    """Every kernel ends the process."""

    def __call__(self, task):
        os._exit(9)
