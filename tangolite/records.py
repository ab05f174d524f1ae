"""What an evaluation keeps: one JSON object a line, which `tangolite.inspector.VerifierInspector` opens.

The first line says what made the file, `{"tangolite_records": 1, "settings": {…}}`.  Every other line is the
record of one problem, plain JSON (`tangolite.lab.records` writes them):

    index      place of the problem in the data, from 0
    source     name of the data set (of ProcessBench with its split: processbench/gsm8k), or of the task
    question
    gold       the gold answer; null where a solution's correctness is given instead (ProcessBench)
    solutions  list of
        kind        "greedy", "sample" or "given" (ProcessBench)
        text        the whole completion
        answer      what was read from it, null where nothing could be
        status      match, differ, no_answer, no_gold or timeout, as `answers_status` says; not "given"
        correct     is the answer right?
        vote        of samples: number of the first sample with an equal answer, null without an answer
        truncated   was the completion cut at the length limit?  not "given"
        steps       texts of the steps
        truth       whether each step is true, null where nobody knows (measured, never rewarded)
        label       index of the first wrong step, -1 where all are right, null where nobody knows
        tokens      optional: the text of every token, so that values per token can be shown
        step_ends   with tokens: index of the token that completes each step
        verifications  list of
            text        the whole completion of the verifier
            judgements  one truth value a step, null where they could not be read
            final       the final judgement, null where it could not be read
            analyses    what the verifier wrote about each step, without the judgement
            by          optional: who wrote it, for example "before" or "after" of two checkpoints

Other keys may be added; readers ignore what they do not know.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FORMAT = "tangolite_records"
Record = dict[str, Any]


def read_records(path: str | Path) -> list[Record]:
    """The records of a file in the order of the problems, also while it is being written."""
    return sorted(read_file(Path(path))[1], key=lambda record: record["index"])


def read_settings(path: str | Path) -> dict[str, Any]:
    """What made a file of records."""
    return read_file(Path(path))[0]


def read_file(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """(settings, records) of the whole lines; one that a kill cut off has no end."""
    lines = path.read_bytes().split(b"\n")[:-1]
    rows = [_loaded(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    if not rows or rows[0].get(FORMAT) != 1 or not isinstance(rows[0].get("settings"), dict):
        raise ValueError(f"{path} is not a file of records (of this version): its first line is not theirs")
    for number, row in enumerate(rows[1:], 2):
        if not isinstance(row.get("index"), int) or not isinstance(row.get("solutions"), list):
            raise ValueError(f"{path}, line {number}: a record needs index, question and solutions")
    return rows[0]["settings"], rows[1:]


def _loaded(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the second for brackets in thousands
        row = None
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: not a JSON object, so this is no file of records, or it was damaged. Remove the line "
            f"to have its problem done again, or name another file"
        )
    return row
