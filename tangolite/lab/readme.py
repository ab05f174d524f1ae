"""The tables of README.md, from the committed results: `python -m tangolite.lab.readme README.md figures`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tangolite import covrl, tango
from tangolite import evaluate as evaluation
from tangolite.lab.claims.results import table


def tables(figures: Path) -> dict[str, str]:
    """Every table by the name of its marks."""
    read = lambda name: json.loads((figures / f"{name}.json").read_text(encoding="utf-8"))  # noqa: E731
    return {
        "claims": table(read("claims/claims")),
        "metrics": metrics_table(),
        "logprob": logprob_table(read("logprob/cpu")),
    }


def metrics_table() -> str:
    """Every metric of `metrics.jsonl` and its sentence."""
    families = (("tango", tango.METRICS), ("covrl", covrl.METRICS), ("both, held out", evaluation.METRICS))
    told = [(family, name, said) for family, known in families for name, said in known.items()]
    rows = [f"| {family} | `{name}` | {said.replace('|', '&#124;')} |" for family, name, said in told]
    return "\n".join(["| run | metric | what it says |", "|---|---|---|", *rows])


def logprob_table(report: dict) -> str:
    """Forward and backward of every way, at every size."""
    lines = [
        "| size | way | time | memory beyond inputs and gradients | error of a log-prob |",
        "|" + "---|" * 5,
    ]
    for row in report["rows"]:
        if row["mode"] != "full":
            continue
        size = f"{row['n']:,} x {row['d']:,} x {row['v']:,}, {row['dtype']}"
        if "seconds" not in row:
            lines.append(f"| {size} | {row['way']} | {row['skipped']} | | |")
            continue
        error = f"{row['logp_error']:.0e}" if "logp_error" in row else ""
        memory = f"{row['extra_bytes'] / 1e6:,.0f} MB"
        lines.append(f"| {size} | {row['way']} | {row['seconds']:.2f} s | {memory} | {error} |")
    return "\n".join(lines)


def write_into(readme: Path, figures: Path) -> None:
    """Put every table between its marks in a Markdown file; ValueError where a mark is missing."""
    text = readme.read_text(encoding="utf-8")
    for name, made in tables(figures).items():
        begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"{readme} has no place for the table: it needs {begin} and {end}")
        text = f"{before}{begin}\n{made}\n{end}{after}"
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_into(Path(sys.argv[1]), Path(sys.argv[2]))
