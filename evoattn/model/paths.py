"""Where the program's own files lie: beside the package in a checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "templates"
DEVICE_HEADERS = TEMPLATES / "device"
SEARCH_SPACES = ROOT / "search_spaces"
REPORT_TEMPLATES = ROOT / "reports"
MIGRATIONS = ROOT / "db"
DEFAULT_DATABASE = f"sqlite:///{ROOT / 'db' / 'evoattn.sqlite'}"
CACHE = ROOT / "build" / "cubins"
