"""Writing the file of an evaluation so that it stays whole through kills, restarts and full disks.

What stands in such a file is said in `tangolite.records`, which reads it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tangolite.records import FORMAT, Record, read_file
from tangolite.training import Interrupted


class RecordFile(NamedTuple):
    """A file of records that more can be added to, and what stands in it already, by index."""

    path: Path
    done: dict[int, Record]

    def add(self, records: list[Record]) -> None:
        """Append; they are on the disk when this returns, and readers never see a part of a line."""
        _append(self.path, records)
        self.done.update({record["index"]: record for record in records})


def open_records(path: str | Path, settings: dict[str, Any]) -> RecordFile:
    """Begin a file of records, or go on with the one that was begun with these settings.

    A last line that a kill cut off is removed; its problem will be done again.  Raises ValueError for a file
    that holds anything else, that other settings made, or whose lines were damaged in the middle.
    """
    path, settings = Path(path), json.loads(json.dumps(settings))
    head = {FORMAT: 1, "settings": settings}
    if not path.exists() or _only_begun(path, head):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        _append(path, [head])
        return RecordFile(path, {})
    there, records = read_file(path)
    if differ := [key for key in {**there, **settings} if there.get(key) != settings.get(key)]:
        lines = "".join(f"\n  {k}: there {there.get(k)!r}, asked for {settings.get(k)!r}" for k in differ)
        raise ValueError(
            f"{path} was made with other settings, so it cannot be gone on with; name another file, or give "
            f"the same settings again:{lines}"
        )
    _repair(path)
    return RecordFile(path, {record["index"]: record for record in records})


def _only_begun(path: Path, head: dict[str, Any]) -> bool:
    """Was the process killed before the first line was whole?"""
    content = path.read_bytes()
    return b"\n" not in content and _line(head).startswith(content)


def _repair(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        print(f"{path}: the last record was cut off and will be made again", file=sys.stderr)
        os.truncate(path, whole)


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        with open(path, "ab") as file:
            file.write(b"".join(map(_line, rows)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(
            f"{path} could not be written ({error.strerror or error}); what it holds is kept. Make room, or "
            f"make it writable, and give the same command again"
        ) from error


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


# --- block by block ----------------------------------------------------------------------------------


def check_same(file: RecordFile, asked: Sequence[tuple[str, str | None]]) -> None:
    """Raises ValueError where the records are of other problems (question, gold) than those asked now."""
    for index, record in file.done.items():
        if index < len(asked) and (record["question"], record["gold"]) != asked[index]:
            raise ValueError(
                f"{file.path} holds other problems than these: record {index} asks "
                f"{record['question']!r:.60}, not {asked[index][0]!r:.60}; name another file"
            )


def fill(file: RecordFile, total: int, size: int, make: Callable[[range], list[Record]]) -> list[Record]:
    """Make and write the records that are missing, ``size`` at a time; returns all ``total``.

    ``make`` is given whole blocks, also where a kill left only a part of one, so that a block's random draws
    do not depend on the interruption.  Raises Interrupted at Ctrl-C.
    """
    blocks = [range(i, min(i + size, total)) for i in range(0, total, size)]
    with Progress(total, sum(index < total for index in file.done)) as progress:
        try:
            for block in blocks:
                if any(index not in file.done for index in block):
                    new = [record for record in make(block) if record["index"] not in file.done]
                    file.add(new)
                    progress.tick(len(new))
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped: {progress.there} of {total} problems are in {file.path}; the same command goes on "
                f"from there"
            ) from None
    return [file.done[index] for index in range(total)]


class Progress:
    """A bar with rate and time left on a terminal; a line now and then elsewhere."""

    def __init__(self, total: int, there: int, every: float = 10.0) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=total, initial=there, unit="problem", disable=None, file=sys.stderr)
        self.total, self.first, self.there, self.every = total, there, there, every
        self.began = self.spoken = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def tick(self, new: int) -> None:
        self.there += new
        self.bar.update(new)
        now = time.monotonic()
        if self.bar.disable and (now - self.spoken > self.every or self.there == self.total):
            left = (now - self.began) / (self.there - self.first) * (self.total - self.there)
            print(f"{self.there}/{self.total} problems, {left:.0f} s left", file=sys.stderr, flush=True)
            self.spoken = now
