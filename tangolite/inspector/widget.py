"""The inspector: stock ipywidgets controls over records of what a verifier said.

Every control can be reached and worked by the keyboard; what they show is HTML from `page`, so it reads the
same in a saved page.  Verifying again runs in a thread of its own: the controls stay alive, Stop included.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from tangolite.grading import answers_match
from tangolite.inspector.again import verifications
from tangolite.inspector.page import (
    LIMIT,
    STYLE,
    head,
    literal,
    page,
    render_feedback,
    steps_table,
    texts,
    tokens,
    visible,
    votes_table,
)
from tangolite.inspector.reading import FILTERS, GRADED, Advantages, Library, Shown, advantages, side_by_side
from tangolite.models import Policy
from tangolite.parsing import extract_answer, split_steps
from tangolite.records import read_records
from tangolite.tasks import Problem, Task

COLOURS = ("mixed advantage", "outcome advantage", "step advantage", "no colours")
WIDE = {"description_width": "initial"}
NARROW = {"width": "auto"}


class VerifierInspector(widgets.VBox):
    """Browse what a verifier said of each step, and question it.

    ``records`` is a list of records (see `tangolite.records`), the path of a file of them, or a dict that
    maps names of checkpoints to either: then their verifications of the same solutions stand side by side.
    ``policy`` is a verifier, or a dict of several by name: with one, a solution can be edited and verified
    again.  ``task`` is a built-in task: with it the steps of an edited solution have a known truth.

    Raises ValueError where there is no record, or a file is none of ours.
    """

    def __init__(
        self,
        records: Sequence[Mapping] | Mapping[str, Any] | str | Path,
        *,
        policy: Policy | Mapping[str, Policy] | None = None,
        task: Task | None = None,
    ) -> None:
        self.policies = (
            policy if isinstance(policy, Mapping) else {} if policy is None else {"verifier": policy}
        )
        self.task, self.busy, self._stop = task, None, threading.Event()
        self.solutions: list[Shown] = []  # of the record that is shown
        self._quiet = False
        self._make_controls()
        self.library = Library(gathered(records))
        if not self.library.records:
            raise ValueError("there is no record to look at: evaluate something first, or name another file")
        super().__init__(self._rows(), layout={"max_width": "1150px"})
        self._connect()
        self._filter()

    def __repr__(self) -> str:
        return f"VerifierInspector({len(self.library.records)} records)"

    # --- controls ---------------------------------------------------------------------------------

    def _make_controls(self) -> None:
        button, text = widgets.Button, widgets.Text
        self.which = widgets.Dropdown(options=list(FILTERS), description="Show", style=WIDE)
        self.count = widgets.HTML()
        self.back, self.forward = (
            button(description=d, layout=NARROW) for d in ("Prev record", "Next record")
        )
        self.record = widgets.IntSlider(
            min=1, max=1, description="Record", continuous_update=False, style=WIDE
        )
        self.solution = widgets.Dropdown(description="Solution", style=WIDE)
        self.said = widgets.Dropdown(description="Verification", style=WIDE)
        self.beside = widgets.Dropdown(description="beside", style=WIDE)
        self.colours = widgets.Dropdown(options=COLOURS, description="Colour tokens by", style=WIDE)
        self.less, self.more = (button(description=d, layout=NARROW) for d in ("Prev alpha", "Next alpha"))
        self.alpha = widgets.FloatSlider(0.5, min=0.0, max=1.0, step=0.05, description="alpha", style=WIDE)
        self.view, self.strip = widgets.HTML(), widgets.HTML()
        self.edit = widgets.Textarea(layout={"width": "100%", "height": "9em"})
        self.with_policy = widgets.Dropdown(options=list(self.policies), description="Verifier", style=WIDE)
        self.samples = widgets.BoundedIntText(3, min=1, max=32, description="samples", style=WIDE)
        self.warmth = widgets.BoundedFloatText(
            1.0, min=0.0, max=2.0, step=0.1, description="temperature", style=WIDE
        )
        self.most = widgets.BoundedIntText(512, min=1, max=8192, description="tokens at most", style=WIDE)
        self.verify, self.stop, self.restore = (
            button(description=d, layout=NARROW) for d in ("Verify again", "Stop", "Undo edits")
        )
        self.stop.disabled = True
        self.progress = widgets.IntProgress(min=0, max=1, layout={"width": "12em"})
        self.status = widgets.HTML()
        self.path = text(placeholder="answers.jsonl", description="File", style=WIDE)
        self.opener = button(description="Open", layout=NARROW)
        self.target = text("feedback.html", description="Page", style=WIDE)
        self.saver = button(description="Save page", layout=NARROW)
        for control in (self.samples, self.warmth, self.most):
            control.layout.width = "auto"

    def _rows(self) -> list[widgets.Widget]:
        def row(*children: widgets.Widget) -> widgets.HBox:
            return widgets.HBox(children, layout={"flex_flow": "row wrap", "align_items": "center"})

        again = [
            widgets.HTML("Change the solution, then have it verified again:"),
            self.edit,
            row(self.with_policy, self.samples, self.warmth, self.most),
            row(self.verify, self.stop, self.restore, self.progress),
        ]
        without = [widgets.HTML("To verify an edited solution, pass <code>policy=</code> with a verifier.")]
        return [
            row(self.which, self.count),
            row(self.back, self.record, self.forward, self.solution),
            row(self.said, self.beside),
            self.view,
            row(self.colours, self.less, self.alpha, self.more),
            self.strip,
            *(again if self.policies else without),
            row(self.path, self.opener, self.target, self.saver),
            self.status,
        ]

    def _connect(self) -> None:
        self.which.observe(lambda _: self._filter(), "value")
        self.record.observe(lambda _: self._loud(self._open_record), "value")
        self.solution.observe(lambda _: self._loud(self._open_solution), "value")
        for control in (self.said, self.beside):
            control.observe(lambda _: self._loud(self._draw), "value")
        for control in (self.colours, self.alpha):
            control.observe(lambda _: self._loud(self._draw_strip), "value")
        self.back.on_click(lambda _: self._move(-1))
        self.forward.on_click(lambda _: self._move(1))
        self.less.on_click(lambda _: self._turn(-1))
        self.more.on_click(lambda _: self._turn(1))
        self.verify.on_click(lambda _: self.verify_again())
        self.stop.on_click(lambda _: self._stop.set())
        self.restore.on_click(lambda _: setattr(self.edit, "value", sendable(self.shown.text)))
        self.opener.on_click(lambda _: self.open_file(self.path.value))
        self.saver.on_click(lambda _: self.save_page(self.target.value))

    # --- browsing ---------------------------------------------------------------------------------

    @property
    def places(self) -> list[int]:
        return self.library.places[self.which.value]

    @property
    def shown(self) -> Shown:
        return self.solutions[self.solution.value]

    def _loud(self, draw) -> None:
        """Draw because of the reader, not because a control was filled."""
        if not self._quiet:
            draw()

    def _fill(self, control: widgets.Widget, **values: Any) -> None:
        quiet, self._quiet = self._quiet, True
        for name, value in values.items():
            setattr(control, name, value)
        self._quiet = quiet

    def _filter(self) -> None:
        count = len(self.places)
        self.count.value = f"{count:,} of {len(self.library.records):,} records"
        for control in (self.back, self.forward, self.record):
            control.disabled = count == 0
        if count == 0:
            self.view.value = (
                f'{STYLE}<div class="tl"><p>No record is like that. Choose another filter.</p></div>'
            )
            self.strip.value = ""
            return
        self._fill(self.record, value=1, max=count)
        self._open_record()

    def _move(self, by: int) -> None:
        self.record.value = min(max(self.record.value + by, 1), self.record.max)

    def _turn(self, by: int) -> None:
        self.alpha.value = round(min(max(self.alpha.value + by * self.alpha.step, 0.0), 1.0), 2)

    def _open_record(self, which: int | None = None) -> None:
        self.solutions = self.library[self.places[self.record.value - 1]]
        if not self.solutions:
            self.view.value = render_feedback({})
            self.strip.value = ""
            return
        names = [(f"{i + 1} of {len(self.solutions)}: {_mark(s)}", i) for i, s in enumerate(self.solutions)]
        test = FILTERS[self.which.value]
        first = next((i for i, s in enumerate(self.solutions) if test(s)), 0) if which is None else which
        self._fill(self.solution, options=names)
        self._fill(self.solution, value=first)
        self._open_solution()

    def _open_solution(self) -> None:
        said = self.shown.said
        names = [
            (f"{i + 1} of {len(said)}{': ' + visible(v.by, 40) if v.by else ''}", i)
            for i, v in enumerate(said)
        ]
        names = names or [("none", None)]
        votes = [("the votes", "votes")] if len(said) > 1 else []
        self._fill(self.said, options=names)
        self._fill(self.said, value=names[0][1])
        self._fill(self.beside, options=[("nothing", None), *votes, *names])
        other = next((i for i, v in enumerate(said) if v.by != said[0].by), None)
        self._fill(self.beside, value=other if other is not None else "votes" if votes else None)
        self.edit.value = sendable(self.shown.text)
        self._draw()

    def _chosen(self) -> list:
        places = [self.said.value, self.beside.value]
        return [self.shown.said[i] for i in dict.fromkeys(places) if isinstance(i, int)]

    def _draw(self) -> None:
        shown, said = self.shown, self._chosen()
        group = shown.of(said[0].by) if said else []
        votes = votes_table(shown, group) if self.beside.value == "votes" else ""
        body = head(shown, LIMIT) + steps_table(shown, said, LIMIT) + votes + texts(shown, said, LIMIT)
        self.view.value = f'{STYLE}<div class="tl" role="region" aria-label="verification">{body}</div>'
        by = said[0].by if said else None
        self._advantages: Advantages = advantages(self.solutions, self.solution.value, by)
        self._draw_strip()

    def _draw_strip(self) -> None:
        found, alpha = self._advantages, self.alpha.value
        name = self.colours.value
        values = {
            COLOURS[0]: lambda: found.mixed(alpha),
            COLOURS[1]: found.outcome.tolist,
            COLOURS[2]: found.step.tolist,
        }.get(name)
        if values is None:
            self.strip.value = ""
            return
        group = f"over a group of {found.group}" if found.group > 1 else "of this solution alone"
        weight = f", alpha {alpha:.2f}" if name == COLOURS[0] else ""
        body = tokens(self.shown.pieces[0], values(), f"Tokens with their {name}{weight}, {group}")
        self.strip.value = f'{STYLE}<div class="tl">{body}</div>'

    # --- files ------------------------------------------------------------------------------------

    def open_file(self, path: str) -> None:
        """Look at another file of records; a bad one is said, and what was shown stays."""
        try:
            library = Library(gathered(path))
            if not library.records:
                raise ValueError(f"{path} holds no record yet")
        except (OSError, ValueError) as error:
            self._say(f"Not opened: {error}")
            return
        self.library = library
        self._filter()
        self._say(f"{len(library.records):,} records of {path}")

    def save_page(self, path: str) -> None:
        """Write the record that is shown as a page; never over a file that is not such a page."""
        try:
            there = Path(path)
            if there.exists() and b'content="tangolite"' not in there.read_bytes()[:400]:
                raise ValueError("there is another file by that name, and it is not replaced")
            if not self.places:
                raise ValueError("no record is shown")
            body = render_feedback({"question": self.shown.question, "gold": self.shown.gold,
                             "solutions": [s.raw for s in self.solutions]})  # fmt: skip
            there.write_text(page(f"Feedback: {self.shown.question}", body), encoding="utf-8")
        except (OSError, ValueError) as error:
            self._say(f"Not saved: {error}")
            return
        self._say(f"Saved {path}")

    def _say(self, text: str) -> None:
        self.status.value = f'{STYLE}<div class="tl" role="status">{literal(text, 2000)}</div>'

    # --- again ------------------------------------------------------------------------------------

    def verify_again(self) -> None:
        """Have the edited solution verified, in a thread; the result becomes one more solution."""
        if not self.policies or (self.busy is not None and self.busy.is_alive()):
            return
        steps = [step.text for step in split_steps(self.edit.value)]
        if not steps:
            self._say("There is no step in this text: a step stands between <step> and </step>.")
            return
        self._stop.clear()
        self.verify.disabled, self.stop.disabled = True, False
        arguments = (self.shown, self.places[self.record.value - 1], self.edit.value, steps)
        self.busy = threading.Thread(target=self._work, args=arguments, daemon=True)
        self.busy.start()

    def _work(self, shown: Shown, place: int, text: str, steps: list[str]) -> None:
        name, n, most = self.with_policy.value, self.samples.value, self.most.value
        n = n if self.warmth.value > 0 else 1  # greedy ones would all be the same
        self.progress.max, self.progress.value = most, 0
        try:
            for found, made in verifications(
                self.policies[name], shown.question, text, len(steps), n=n, temperature=self.warmth.value,
                most=most, stopped=self._stop.is_set,
            ):  # fmt: skip
                written, self.progress.value = found, made
                self._say(f"Verifying: {made} of at most {most} tokens")
            if self._stop.is_set():
                self._say("Stopped; nothing was kept.")
                return
            self.library.add(place, self._edited(shown, text, steps, name, written))
            self._say(f"{n} verification{'s' * (n > 1)} of the edited solution")
            if place in self.places:
                self._fill(self.record, max=len(self.places), value=self.places.index(place) + 1)
                self._open_record(which=len(self.library[place]) - 1)
        except Exception as error:  # shown where the reader looks, since a thread has no cell to fail in
            self._say(f"Could not verify: {type(error).__name__}: {error}")
        finally:
            self.verify.disabled, self.stop.disabled = False, True
            self.progress.value = 0

    def _edited(self, shown: Shown, text: str, steps: list[str], name: str, written: list[str]) -> dict:
        found = {"kind": "edited", "text": text, "steps": steps}
        if self.task is not None and shown.gold is not None:
            answer = extract_answer(text)
            found["truth"] = self.task.step_truth(Problem(shown.question, shown.gold), steps)
            found["correct"] = answer is not None and answers_match(answer, shown.gold)
        return found | {"verifications": [{"text": t, "by": name} for t in written]}


def gathered(records: Any) -> list[Any]:
    """The records meant: a list as it is, a file read, several checkpoints side by side."""
    if isinstance(records, str | Path):
        return read_records(records)
    if isinstance(records, Mapping):
        if "solutions" in records or "solution" in records:
            return [records]
        return side_by_side({name: gathered(rows) for name, rows in records.items()})
    return list(records)


def _mark(shown: Shown) -> str:
    return f"{visible(shown.kind, 20)}, {GRADED[shown.correct]}"


def sendable(text: str) -> str:
    """What a text field can take: a front end is sent UTF-8, which has no lone surrogates."""
    return text[:LIMIT].encode("utf-8", "replace").decode()
