"""The inspector as a student meets it: JupyterLab in a real browser, run, clicked, typed into, looked at.

Needs Chromium and playwright; skipped, with the reason, where one is missing.  With `TANGOLITE_SCREENSHOTS`
naming a folder, the pictures are kept there.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import numpy as np
import pytest
from matplotlib.image import imread

pytest.importorskip("playwright", reason="playwright is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine (Debian: apt install chromium)"
)

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
CELL = """
import tempfile
from pathlib import Path
from tangolite import load_policy
from tangolite.inspector import VerifierInspector
from tangolite.lab.evaluation import Plan, evaluate_problems
from tangolite.prompts import TINY
from tangolite.tasks import ChainArithmetic, problems

task, verifier = ChainArithmetic(modulus=31, steps=4), load_policy("tiny-verifier")
plan = Plan(samples=3, max_new_tokens=60, verifications=3, verifier_temperature=1.0,
            verifier_max_new_tokens=80, tokens=True)
file = Path(tempfile.mkdtemp()) / "answers.jsonl"
evaluate_problems(file, problems(task, 6, "look"), load_policy("tiny-generator"), verifier,
                  plan=plan, prompts=TINY, source="chains", task=task)
inspector = VerifierInspector(file, policy=verifier, task=task)
inspector
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address of a JupyterLab on loopback, in a folder with one notebook."""
    folder = tmp_path_factory.mktemp("lab")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.strip())])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "look.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        *("--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--IdentityProvider.token="),
        *(f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"),
        *("--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"),
    ]
    root = str(Path(__file__).parent.parent)
    keep = {"JUPYTER_CONFIG_DIR": folder / "config", "JUPYTER_RUNTIME_DIR": folder / "runtime",
            "JUPYTERLAB_SETTINGS_DIR": folder / "settings", "JUPYTERLAB_WORKSPACES_DIR": folder / "spaces",
            "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    log = (folder / "log.txt").open("w")
    server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], stdout=log, stderr=log,
                              env=os.environ | {k: str(v) for k, v in keep.items()})  # fmt: skip
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        else:
            raise AssertionError((folder / "log.txt").read_text())
        yield f"http://127.0.0.1:{port}/lab/tree/look.ipynb"
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="module")
def seen(lab):
    """The notebook in a browser, run to its end: the page with the inspector on it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1600})
        page.set_default_timeout(60_000)
        page.goto(lab)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_selector("text=/ipykernel.*\\| Idle/")  # before that, running asks for a kernel
        for command in ("application:toggle-left-area", "notebook:run-all-cells"):
            page.evaluate(f"void window.jupyterapp.commands.execute('{command}')")
        page.wait_for_selector(".tl table")
        yield page
        browser.close()


def text(page) -> str:
    return " ".join(page.inner_text(".tl[aria-label=verification]").split())


def press(page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def pick(page, label: str, option: str) -> None:
    """Choose in the dropdown that is described by this label."""
    row = page.locator(".widget-dropdown", has=page.locator("label", has_text=re.compile(f"^{label}$")))
    row.locator("select").select_option(label=option)


def shot(page, name: str, tmp_path: Path) -> np.ndarray:
    folder = Path(os.environ.get("TANGOLITE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(folder / f"{name}.png"))
    return imread(folder / f"{name}.png")[..., :3]


def test_the_first_record_is_shown_with_words_for_every_verdict(seen):
    shown = text(seen)
    assert "Question:" in shown and "final" in shown
    assert re.search(r"\u2713 CORRECT|\u2717 INCORRECT", shown) and re.search("agrees|DISAGREES", shown)
    assert "6 of 6 records" in seen.inner_text(".jp-Notebook")


def test_next_and_previous_change_the_record(seen):
    first = text(seen)
    press(seen, "Next record")
    seen.wait_for_function(
        "t => document.querySelector('.tl[aria-label=verification]').innerText.split(/\\s+/).join(' ') !== t",
        arg=first,
    )
    press(seen, "Prev record")
    seen.wait_for_function(
        "t => document.querySelector('.tl[aria-label=verification]').innerText.split(/\\s+/).join(' ') === t",
        arg=first,
    )


def test_the_alpha_slider_changes_the_numbers_by_its_buttons_and_by_the_keyboard(seen):
    heading = seen.locator(".tl h3", has_text="mixed advantage")
    assert "alpha 0.50" in heading.inner_text()
    press(seen, "Next alpha")
    seen.wait_for_selector(".tl h3:has-text('alpha 0.55')")
    handle = seen.locator(".widget-slider", has_text="alpha").locator(".noUi-handle")
    handle.focus()
    seen.keyboard.press("ArrowLeft")
    seen.wait_for_selector(".tl h3:has-text('alpha 0.50')")


def test_every_control_can_be_reached_with_the_tab_key(seen):
    seen.locator(".widget-dropdown select").first.focus()
    reached = set()
    for _ in range(60):
        tag = seen.evaluate(
            "(e => e.innerText || e.placeholder || e.className || e.tagName)(document.activeElement)"
        )
        reached.add(str(tag).strip())
        seen.keyboard.press("Tab")
    wanted = {"Prev record", "Next record", "Prev alpha", "Next alpha", "Verify again", "Open", "Save page"}
    assert wanted <= reached, wanted - reached


def test_filters_show_only_what_matches(seen):
    pick(seen, "Show", "disagrees with the truth")
    seen.wait_for_selector(".tl-differs")
    assert "DISAGREES" in text(seen)
    pick(seen, "Show", "all")


def test_an_edited_step_is_verified_again(seen):
    field = seen.locator(".widget-textarea textarea")
    edited = re.sub(r"=\d+</step>", "=0</step>", field.input_value(), count=1)
    field.fill(edited)
    field.blur()
    press(seen, "Verify again")
    seen.wait_for_selector("[role=status]:has-text('verifications of the edited solution')")
    shown = text(seen)
    assert "(edited solution)" in shown and "=0" in shown and "Votes of 3 verifications" in shown
    assert "first false step: 1" in shown  # the task knows


def test_it_reads_well_wide_and_narrow_light_and_dark(seen, tmp_path):
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        seen.evaluate(
            "t => void window.jupyterapp.commands.execute('apputils:change-theme', {theme: t})", theme
        )
        dark = "dark" in theme.lower()
        seen.wait_for_function(f"document.body.dataset.jpThemeLight === '{str(not dark).lower()}'")
        for name, width in (("wide", 1280), ("narrow", 480)):
            seen.set_viewport_size({"width": width, "height": 1600})
            seen.locator(".tl[aria-label=verification]").scroll_into_view_if_needed()
            seen.wait_for_timeout(500)
            picture = shot(seen, f"inspector-{'dark' if dark else 'light'}-{name}", tmp_path)
            assert picture.shape[1] == width and (picture.mean() < 0.5) == dark
            assert contrast(seen) >= 4.5
            words, cell = (
                right_edge(seen, at) for at in (".tl[aria-label=verification] p", ".jp-OutputArea")
            )
            assert words <= cell + 1, f"words run out of their cell at {width}"
    seen.set_viewport_size({"width": 1280, "height": 1600})


def right_edge(page, selector: str) -> float:
    return page.evaluate("s => document.querySelector(s).getBoundingClientRect().right", selector)


def contrast(page) -> float:
    """Of the words on the inspector's page, by the formula of WCAG."""
    style = "getComputedStyle(document.querySelector('.tl[aria-label=verification]'))"
    colours = page.evaluate(f"(s => [s.color, s.backgroundColor])({style})")
    light = []
    for colour in colours:
        red, green, blue = (float(c) / 255 for c in re.findall(r"[\d.]+", colour)[:3])
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
        light.append(0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2])
    return (max(light) + 0.05) / (min(light) + 0.05)
