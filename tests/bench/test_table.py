"""The bench's table beside the times: energy, where a final measured it."""

import io
import json

from rich.console import Console

from evoattn.bench.row import Row, Time
from evoattn.bench.table import render_rows, rows_json
from evoattn.model.timing import Timing


def test_the_energy_of_a_call_stands_under_the_times():
    weighed = Time.of(Timing((20.0, 20.0, 21.0), {"energy_mj_per_call": 6.25}))
    row = Row({"name": "seed_h100"}, "", weighed, peers={"cudnn": Time.of(Timing((30.0,), {}))})
    console = Console(width=160, record=True, file=io.StringIO())
    render_rows([row], console)
    assert "seed_h100: mJ per call of the whole board: ours 6.25\n" in console.export_text()
    found = json.loads(rows_json([row]))[0]
    assert found["ours"]["energy_mj"] == 6.25 and found["peers"]["cudnn"]["energy_mj"] is None
