"""New paths through parsers and inspector, found by the package atheris.

python -m tangolite.lab.fuzz --atheris 120
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from tangolite import parsing
from tangolite.lab.fuzz import try_parsers
from tangolite.lab.fuzz_inputs import BOXES, TAGS


def search(seconds: int) -> None:
    """Hands the process over to atheris, which ends it with an exit status of its own: not 0 for a fault.

    An input is a completion of either player; the dictionary holds the tags and boxes.
    """
    try:
        import atheris
    except ImportError:
        sys.exit("this needs the package atheris (Linux): pip install atheris; nothing else here does")
    for name in [name for name in sys.modules if name.startswith("tangolite.inspector")]:
        del sys.modules[name]
    with atheris.instrument_imports(include=["tangolite.parsing", "tangolite.inspector"]):
        importlib.reload(parsing)  # in place: `try_parsers` finds the instrumented functions
        inspector = importlib.import_module("tangolite.inspector")

    def one(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        try_parsers((text, len(data) % 5))
        assert inspector.render_feedback({"solution": text, "verification": [text, text]}).isascii()

    folder = Path(tempfile.mkdtemp())
    options = [f"-max_total_time={seconds}", f"-dict={_dictionary(folder)}", "-max_len=4096", "-print_final_stats=1",
               "-timeout=20", f"-artifact_prefix={folder}/"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


def _dictionary(folder: Path) -> Path:
    words = [*TAGS, *(box for box in BOXES if len(box) > 2)]
    lines = ['"' + word.replace("\\", "\\\\") + '"' for word in words]
    (folder / "words.dict").write_text("\n".join(lines), encoding="utf-8")
    return folder / "words.dict"
