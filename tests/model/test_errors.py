"""Sentences of errors speak the language of whoever called."""

import pytest

from evoattn.model.errors import WrongUse, in_python


@pytest.mark.parametrize(
    "said, heard",
    [
        ("Choose another with --db.", "Choose another with db=."),
        ("Name a GPU, for example --gpu l4.", 'Name a GPU, for example gpu="l4".'),
        ("Leave --no-keep out.", "Leave keep=False out."),
        ("Leave --dry-run out.", "Leave dry_run= out."),
        ("`evoattn report --full` shows them.", "`evoattn report --full` shows them."),
    ],
)
def test_options_are_arguments_in_python_and_commands_stay_commands(said, heard):
    with pytest.raises(WrongUse) as raised, in_python():
        raise WrongUse(said)
    assert str(raised.value) == heard
