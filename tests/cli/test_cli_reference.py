"""docs/cli.md has every command and option, with the words of the commands themselves."""

from evoattn.cli.main import app
from scripts.cli_reference import PAGE, page


def test_the_reference_is_what_the_commands_say():
    assert PAGE.read_text() == page(), "run `python -m scripts.cli_reference`"


def test_the_reference_names_every_command_and_option():
    """Independent of how the page is made: whatever a command takes is on it, under that command's heading."""
    import typer

    sections = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## evoattn ")[1:])
    commands = {}
    for name, command in typer.main.get_command(app).commands.items():
        group = getattr(command, "commands", None)
        commands |= {f"{name} {word}": part for word, part in group.items()} if group else {name: command}
    assert list(sections) == list(commands)
    for name, command in commands.items():
        assert command.params or name in ("problems", "gpus", "calibration list")
        for option in (word for p in command.params if p.param_type_name == "option" for word in p.opts):
            assert f"`{option}" in sections[name] or f", {option}" in sections[name], (name, option)
