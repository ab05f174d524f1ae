"""Is every picture in `figures/` made by a cell or a command, told in words, and made again by the last run?

    python -m tangolite.lab.figures                    # who makes what; exit status 1 with what is amiss
    python -m tangolite.lab.figures --since FILE       # and every notebook's pictures are newer than FILE

A notebook NN saves its pictures as `figures/NN_name.png`, and a cell that names the file tells it in words.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

COMMANDS = {  # folder of figures/ -> the command that makes what it holds
    "claims": "python -m tangolite claims --out figures/claims",
    "bench": "python -m tangolite bench peers --out figures/bench/peers.json (and cost, cost.json)",
    "logprob": "python -m tangolite bench logprob --out figures/logprob/cpu.json",
}


def told_in(notebook: Path) -> set[str]:
    """The pictures that a notebook's own words name."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    words = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return {name for name in re.findall(r"figures/(\w+\.png)", words) if name.startswith(notebook.name[:2])}


def faults(root: Path, since: float | None = None) -> list[str]:
    """What is amiss under ``root``: untold, missing or old pictures, and files that nothing makes."""
    told = set().union(*map(told_in, sorted((root / "notebooks").glob("*.ipynb"))))
    there = {path.name: path for path in (root / "figures").glob("*.*")}
    found = [f"figures/{name}: no notebook tells it in words" for name in sorted(there.keys() - told)]
    found += [
        f"figures/{name}: a notebook tells it, and it is not there" for name in sorted(told - there.keys())
    ]
    folders = {path.name for path in (root / "figures").iterdir() if path.is_dir()}
    found += [
        f"figures/{name}/: no command is known to make it" for name in sorted(folders - COMMANDS.keys())
    ]
    if since is not None:
        old = [name for name, path in sorted(there.items()) if path.stat().st_mtime < since]
        found += [f"figures/{name}: the notebooks ran and did not make it again" for name in old]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", type=Path, help="a file written before the notebooks ran")
    parser.add_argument("--root", type=Path, default=Path("."), help="the checkout (default: here)")
    args = parser.parse_args(argv)
    found = faults(args.root, args.since and args.since.stat().st_mtime)
    count = len(list((args.root / "figures").glob("*.png")))
    print("\n".join(found) or f"{count} pictures: each is told in words, and made by its notebook")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
