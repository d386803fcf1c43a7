"""Where tests find the repository and its golden files."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
