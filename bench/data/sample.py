"""Makes azure_conv_sample.csv.gz: a seeded sample of a public trace, small enough to ship.

    python bench/data/sample.py AzureLLMInferenceTrace_conv.csv

Source: Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv.csv (November 2023), CC-BY 4.0; cite
Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024.
A change to the data: 2,000 consecutive requests from a seeded offset; arrivals in seconds from the
first; generated tokens at least 1; no other column.
"""

from __future__ import annotations

import csv
import gzip
import io
import random
import sys
from datetime import datetime
from pathlib import Path

ROWS = 2000


def main() -> None:
    with open(sys.argv[1], newline="") as f:
        rows = list(csv.DictReader(f))
    start = random.Random(1729).randrange(len(rows) - ROWS)
    rows = rows[start : start + ROWS]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    out = io.StringIO()
    out.write("arrival_s,context_tokens,generated_tokens\n")
    for at, row in zip(times, rows, strict=True):
        seconds = (at - times[0]).total_seconds()
        made = max(1, int(row["GeneratedTokens"]))
        out.write(f"{seconds:.3f},{row['ContextTokens']},{made}\n")
    target = Path(__file__).with_name("azure_conv_sample.csv.gz")
    with gzip.GzipFile(target, "wb", mtime=0) as f:
        f.write(out.getvalue().encode())
    print(f"{target}: {target.stat().st_size} bytes, {ROWS} requests")


if __name__ == "__main__":
    main()
