"""Fit the physical factors to published step times.

    python benchmarks/fit_factors.py training.jsonl

Reads measured training configurations (one JSON object a line), fits the factors of `trainplan.costmodel.factors` to
all that can be predicted, and writes profiles/measurements/factors.json, which the product prices with. The figures
that say how good this is leave the scored rows out: `planner validate --leave-one-block-out`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trainplan.planner.comparisons import compare
from trainplan.planner.fitting import fit_all
from trainplan.planner.rows import read_rows

OUT = Path(__file__).resolve().parent.parent / "profiles" / "measurements" / "factors.json"


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path)
    comparisons, _ = compare(read_rows(parser.parse_args().rows))
    fitted = fit_all([c.timed() for c in comparisons if c.as_step_s is not None])
    posterior = fitted.without_block(None)
    data = {
        "source": f"{len(fitted.runs)} published step times of {len({t.block for t in fitted.runs})} publications",
        "residual_log_sd": round(posterior.residual_log_sd, 4),
        "names": list(fitted.names),
        "values": [round(f.value, 4) for f in posterior.factors],
        "cov": [[round(float(x), 7) for x in row] for row in posterior.cov],
    }
    lines = ",\n".join(f'"{key}":{json.dumps(value, separators=(",", ":"))}' for key, value in data.items())
    OUT.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    for line in posterior.describe():
        print(line)


if __name__ == "__main__":
    main()
