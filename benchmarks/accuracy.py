"""How accurate is the cost model? Writes docs/accuracy.md: targets, every block, every factor, and what is still wrong.

    python benchmarks/accuracy.py training.jsonl [--json]

One fit of the physical factors gives the zero-shot figures (each block under factors of the other blocks) and those
after calibration. ``--json`` prints the figures as one document instead of writing the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accuracy_figures import figures, kernels
from accuracy_page import document

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "accuracy.md"


def main() -> None:
    """Write the document, or print its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found = figures(given.rows, say=say)
    say("kernel models")
    reports = kernels()
    if given.json:
        print(json.dumps({**found, "kernels": reports}, indent=1, allow_nan=False))
        return
    text = document(found, reports)
    text.encode("ascii")  # raises on a letter that is none
    OUT.write_text(text, encoding="utf-8")
    say(f"{OUT.relative_to(ROOT)}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
