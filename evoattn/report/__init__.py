"""What a study found, in three formats that print one and the same summary."""

from evoattn.report.data import render_json
from evoattn.report.page import render_html
from evoattn.report.summary import summarise
from evoattn.report.table import render_table

__all__ = ["render_html", "render_json", "render_table", "summarise"]
