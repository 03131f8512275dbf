"""docs/cli.md has every command and option, with the words of the commands themselves."""

import pytest

from evoattn.cli.main import app
from scripts.cli_reference import PAGES, page


@pytest.mark.parametrize("path", PAGES)
def test_the_reference_is_what_the_commands_say(path):
    assert path.read_text() == page(path), "run `python -m scripts.cli_reference`"


def test_the_reference_names_every_command_and_option():
    """Independent of how the pages are made: whatever a command takes is under that command's heading."""
    import typer

    parts = [part for path in PAGES for part in path.read_text().split("\n## evoattn ")[1:]]
    sections = dict(part.split("\n", 1) for part in parts)
    commands = {}
    for name, command in typer.main.get_command(app).commands.items():
        group = getattr(command, "commands", None)
        commands |= {f"{name} {word}": part for word, part in group.items()} if group else {name: command}
    assert list(sections) == list(commands)
    for name, command in commands.items():
        assert command.params or name in ("problems", "gpus", "calibration list")
        for option in (word for p in command.params if p.param_type_name == "option" for word in p.opts):
            assert f"`{option}" in sections[name] or f", {option}" in sections[name], (name, option)
