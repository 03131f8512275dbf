"""CuPy has a folder of its own to write to, wherever the user's home is."""

from pathlib import Path

from evoattn.backends import with_cupy


def test_cupy_gets_a_folder_where_the_home_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    fine, none, given = {"HOME": str(tmp_path)}, {"HOME": str(tmp_path / "file")}, {with_cupy.FOLDER: "mine"}
    for variables in (fine, none, given):
        with_cupy.give_a_folder(variables)
    assert with_cupy.FOLDER not in fine and Path(none[with_cupy.FOLDER]).is_dir() and given[with_cupy.FOLDER] == "mine"
