"""Rows of a data set, each with the words that say where it stands: from a local file, or from the hub."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

BOM = codecs.BOM_UTF8
Located = tuple[str, dict[str, Any]]  # where a row stands, and the row


def file_rows(path: str | Path) -> Iterator[Located]:
    """Rows of a JSONL file, a JSON file (one list of objects) or a Parquet file.

    JSON is told from JSONL by its first character: hubs name either `.json`.  Raises OSError for a file that
    cannot be opened and ValueError, naming file and line, for one that cannot be read.
    """
    rows = _parquet_rows(path) if Path(path).suffix == ".parquet" else _json_rows(path)
    for where, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object with the fields of the set, got {row!r:.60}")
        yield where, row


def _json_rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.removeprefix(BOM).strip())
        first = next(lines, None)
        if first is None:
            raise ValueError(f"{path}: the file is empty")
        if first[1].removeprefix(BOM).lstrip().startswith(b"["):
            file.seek(0)
            for number, row in enumerate(_loaded(file.read(), f"{path}"), 1):
                yield f"{path}, row {number}", row
            return
        for number, line in chain([first], lines):
            yield f"{path}, line {number}", _loaded(line, f"{path}, line {number}")


def _loaded(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error.reason}); give a JSON, JSONL or Parquet file") from None
    except json.JSONDecodeError as error:
        place = (
            f"line {error.lineno}, column {error.colno}" if b"\n" in text.strip() else f"column {error.colno}"
        )
        raise ValueError(
            f"{where}: not valid JSON ({error.msg} at {place}); if the file was cut off, fetch it again. It "
            f"must hold one object a line, or one list of objects"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands
        raise ValueError(f"{where}: JSON that cannot be read ({_line(error)})") from None


def _parquet_rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path}: Parquet files need the pyarrow package: pip install pyarrow, or give the set as JSONL"
        ) from None
    number = 0
    with open(path, "rb") as file:  # an OSError that names the file, where there is none
        try:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
        except pyarrow.ArrowException as error:
            raise ValueError(
                f"{path}: cannot be read as Parquet after row {number} ({_line(error)}); if the file was cut "
                f"off, fetch it again"
            ) from None


def hub_rows(
    name: str, split: str, *, config: str | None = None, file: str | None = None, revision: str | None = None
) -> Iterator[Located]:
    """Rows of a split of a data set of the hub, through the `datasets` package, which caches what it fetches.

    Raises ValueError, with the package's reason and what to do instead, where that does not work.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"reading {name} from the hub needs the datasets package: pip install datasets, or give the path "
            f"of a local copy"
        ) from None
    try:
        files = {} if file is None else {"data_files": {split: file}}
        data = load_dataset(name, config, split=split, revision=revision, **files)
        for number, row in enumerate(data, 1):
            yield f"{name}, {split}, row {number}", row
    except Exception as error:  # of many kinds: no network, no such split, a gate, a full disk
        raise ValueError(
            f"{name}, {split}, cannot be read from the hub ({type(error).__name__}: {_line(error)}). "
            f"Check the name of the split and the network (a gated set wants a login, and HF_HUB_OFFLINE=1 "
            f"allows only what was fetched before), or give the path of a local copy"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
