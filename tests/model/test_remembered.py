"""A table with a limit keeps what it was given last."""

from evoattn.model.remembered import MOST, remember


def test_a_full_table_begins_anew():
    table, sizes = {}, []
    for n in range(7):
        assert remember(table, n, -n, 3) == -n and table[n] == -n
        sizes.append(len(table))
    assert sizes == [1, 2, 3, 1, 2, 3, 1]
    table = dict.fromkeys(range(MOST - 1))
    sizes = [len(table) for n in (-1, -2) if not remember(table, n, 0)]
    assert sizes == [MOST, 1]
