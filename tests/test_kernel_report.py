"""Machine code of the Triton kernels for cards that need not be here: nothing spills, and all of it fits."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent
CARDS = ("sm_80", "sm_90", "sm_100")
KERNELS = ("statistics_kernel", "merge_kernel", "gradient_kernel")
SHARED = {"sm_80": 163_840, "sm_90": 232_448, "sm_100": 232_448}  # bytes that one program may have
SMALLEST = 101_376  # on cards of these generations for desktops, which get the tiles without bulk copies


def report(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tangolite.lab.kernel_report", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(rows as dictionaries, the printed table); half a minute or more, unless they were compiled before."""
    file = tmp_path_factory.mktemp("report") / "kernels.json"
    result = report("--every", "--json", str(file))
    assert result.returncode == 0, result.stderr
    return json.loads(file.read_text("utf-8")), result.stdout


@pytest.fixture(scope="module")
def rows(made):
    return made[0]


def faults(rows, wrong) -> list:
    """The rows for which `wrong` holds, so that a failure shows them."""
    return [row for row in rows if wrong(row)]


def large(row) -> bool:
    """Whether it multiplies tiles of 16-bit numbers: these are to run in the tensor cores."""
    return row["kernel"] != "merge_kernel" and row["dtype"] != "fp32"


def test_every_kernel_is_there_for_every_card_type_and_option(rows):
    of_card = lambda bulk: [("bf16", False), ("bf16", bulk), ("fp16", bulk), ("fp32", False)]  # noqa: E731
    wanted = {
        (kernel, card, *way, entropy, extras)
        for card in CARDS
        for way in of_card(card != "sm_80")
        for kernel, entropy, extras in itertools.product(KERNELS, (False, True), (False, True))
    }
    keys = ("kernel", "card", "dtype", "bulk", "entropy", "extras")
    found = Counter(tuple(row[key] for key in keys) for row in rows)
    assert set(found) == wanted and set(found.values()) == {1}


def test_no_register_spills(rows):
    assert not faults(rows, lambda row: row["spilled"] != 0)
    assert not faults(rows, lambda row: not 16 <= row["registers"] <= 255)


def test_shared_memory_fits_the_card(rows):
    assert not faults(rows, lambda row: not 0 <= row["shared"] <= SHARED[row["card"]])
    assert not faults(rows, lambda row: not row["bulk"] and row["shared"] > SMALLEST)


def test_tiles_of_16_bit_numbers_meet_in_the_tensor_cores(rows):
    assert not faults(rows, lambda row: large(row) and not row["tensor_core"])
    assert {row["card"] for row in rows if large(row)} == set(CARDS)


def test_float32_is_multiplied_exactly(rows):
    # In the tensor cores it would be TF32, with the digits of float16.
    assert not faults(rows, lambda row: row["dtype"] == "fp32" and row["tensor_core"])


def test_the_copy_engine_reads_what_is_meant_for_it_and_nothing_else(rows):
    meant = lambda row: row["bulk"] and row["kernel"] != "merge_kernel"  # noqa: E731
    assert not faults(rows, lambda row: meant(row) != row["bulk_copy"])
    assert {(row["card"], row["dtype"]) for row in rows if meant(row)} == {
        (card, dtype) for card in ("sm_90", "sm_100") for dtype in ("bf16", "fp16")
    }


def test_the_table_has_a_line_for_every_row(made):
    rows, printed = made
    lines = printed.splitlines()
    assert lines[0].split()[:3] == ["kernel", "card", "type"] and len(lines) == 1 + len(rows)
    for line, row in zip(lines[1:], rows, strict=True):
        cells = line.split()
        assert cells[:3] == [row["kernel"], row["card"], row["dtype"]]
        assert cells[6:9] == [str(row[key]) for key in ("registers", "spilled", "shared")]
        assert cells[9] == ("tensor" if row["tensor_core"] else "plain")


def test_interpreted_kernels_have_no_machine_code_to_report():
    result = report(interpret=True)
    assert result.returncode == 1
    assert "unset TRITON_INTERPRET" in result.stdout and "Traceback" not in result.stderr
