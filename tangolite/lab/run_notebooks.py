"""Execute the notebooks from top to bottom, into pages to read or in place to refresh them.

    python -m tangolite.lab.run_notebooks                       # notebooks/*.ipynb -> build/pages/*.html
    python -m tangolite.lab.run_notebooks notebooks/01_x.ipynb  # that one alone
    python -m tangolite.lab.run_notebooks --in-place            # the committed outputs anew, solutions too

Without --in-place the notebooks on disk are only read. The pictures of a page also go to build/figures.
"""

from __future__ import annotations

import argparse
import base64
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

NOTEBOOKS = Path("notebooks")
CELL_TIMEOUT = 1800  # seconds; a cell that is still running then has hung
SOURCE_LINES = 6  # of a failing cell, shown in the message


def find(paths: list[str], in_place: bool) -> list[Path]:
    """The notebooks asked for, or all of them in order; solutions only when refreshing."""
    if paths:
        return [Path(path) for path in paths]
    pattern = "**/*.ipynb" if in_place else "*.ipynb"
    return sorted(path for path in NOTEBOOKS.glob(pattern) if ".ipynb_checkpoints" not in path.parts)


class NotebookFailed(Exception):
    """A notebook stopped; the message says which one, in which cell, and why."""


def execute(path: Path) -> NotebookNode:
    """Run a notebook in a fresh kernel of this Python, in its own folder; returns it with new outputs.

    Raises NotebookFailed when a cell fails that does not carry the tag `raises-exception`, hangs, or ends its
    kernel.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    started = [0]
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent.resolve())}},
        store_widget_state=False,  # a slider's state is no output, and it changes from run to run
        record_timing=False,  # clock times in the metadata would change every committed notebook
        extra_arguments=["--log-level=ERROR"],
        on_cell_start=lambda cell, cell_index: started.append(cell_index),
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise NotebookFailed(explain(path, notebook.cells[started[-1]].source, error)) from error
    return notebook


def explain(path: Path, source: str, error: Exception) -> str:
    """A failure in a few lines: which notebook, what went wrong, the beginning of the cell."""
    name = getattr(error, "ename", type(error).__name__)
    what = getattr(error, "evalue", str(error).split("\n")[0])
    shown = "\n".join(f"    {line}" for line in source.splitlines()[:SOURCE_LINES])
    return f"{path} stopped: {name}: {what}\n  in the cell that begins\n{shown}\n  To look at it: make lab"


def pictures(notebook: NotebookNode) -> Iterator[bytes]:
    """The PNGs among a notebook's outputs, in order."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                yield base64.b64decode(output["data"]["image/png"])


def write_page(notebook: NotebookNode, name: str, build: Path) -> Path:
    """Write build/pages/name.html and build/figures/name-1.png, -2.png, ...; returns the page's path."""
    from nbconvert import HTMLExporter

    page = build / "pages" / f"{name}.html"
    figures = build / "figures"
    for folder in (page.parent, figures):
        folder.mkdir(parents=True, exist_ok=True)
    html, _ = HTMLExporter().from_notebook_node(notebook, resources={"metadata": {"name": name}})
    page.write_text(html, encoding="utf-8")
    for stale in figures.glob(f"{name}-*.png"):
        stale.unlink()
    for number, picture in enumerate(pictures(notebook), start=1):
        (figures / f"{name}-{number}.png").write_bytes(picture)
    return page


def write_back(notebook: NotebookNode, path: Path) -> Path:
    """Overwrite a notebook with its executed form, kernel name and all as every machine would write them."""
    import nbformat

    notebook.metadata.pop(
        "widgets", None
    )  # states under new random names each time; no reader of the file sees them
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["language_info"] = {"name": "python"}  # the minor version differs between machines
    nbformat.write(notebook, path)
    return path


def run(paths: list[Path], build: Path, in_place: bool) -> int:
    """Execute the notebooks one after another and stop at the first that fails; returns the exit code."""
    for number, path in enumerate(paths, start=1):
        print(f"[{number}/{len(paths)}] {path} ...", flush=True)
        start = time.perf_counter()
        try:
            notebook = execute(path)
        except NotebookFailed as failure:
            print(failure, file=sys.stderr)
            return 1
        done = write_back(notebook, path) if in_place else write_page(notebook, path.stem, build)
        print(f"[{number}/{len(paths)}] {path} -> {done} in {time.perf_counter() - start:.0f} s", flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 when a notebook fails, 2 when there is none to run."""
    parser = argparse.ArgumentParser(
        prog="python -m tangolite.lab.run_notebooks", description=__doc__.split("\n")[0]
    )
    parser.add_argument("notebooks", nargs="*", help="which ones (default: all in notebooks/)")
    parser.add_argument(
        "--in-place", action="store_true", help="rewrite the notebooks instead of making pages"
    )
    parser.add_argument(
        "--build", type=Path, default=Path("build"), help="where pages and figures go (default: build)"
    )
    options = parser.parse_args(arguments)
    paths = find(options.notebooks, options.in_place)
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        print(f"no such notebook: {', '.join(missing) or NOTEBOOKS / '*.ipynb'}", file=sys.stderr)
        return 2
    code = run(paths, options.build, options.in_place)
    if code == 0 and not options.in_place:
        build = options.build.resolve()
        print(f"pages:   {build / 'pages'}\nfigures: {build / 'figures'}")
        print(f"open {build / 'pages' / paths[0].stem}.html in a browser")
    return code


if __name__ == "__main__":
    sys.exit(main())
