"""Figures draw what they are given, in more ways than colour; a live plot keeps to one display."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.colors import to_hex, to_rgb
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from tangolite import plots


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def words(fig) -> list[str]:
    return [text.get_text() for ax in fig.axes for text in ax.texts]


def luminance(color) -> float:
    return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114)))


# --- the canvas --------------------------------------------------------------------------------------


def test_importing_the_package_does_not_import_matplotlib():
    code = "import sys, tangolite; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_figures_are_white_with_dark_text_even_under_a_dark_style():
    with plt.style.context("dark_background"):
        fig, axes = plots.figure(2)
        axes[0].set_xlabel("update")
        axes[0].set_title("reward", loc="left")
        fig.canvas.draw()
    ticks = axes[0].get_xticklabels()
    dark = [axes[0].xaxis.label, axes[0].yaxis.label, axes[0].title, *ticks]
    assert len(axes) == 2 and len(ticks) > 1
    assert to_hex(fig.get_facecolor()) == to_hex(axes[1].get_facecolor()) == "#ffffff"
    assert all(luminance(text.get_color()) < 0.3 for text in dark)


def test_a_backend_that_turns_interactive_when_first_used_stays_so(monkeypatch):
    make = plt.figure

    def as_in_a_notebook(*args, **options):
        plt.ion()
        return make(*args, **options)

    monkeypatch.setattr(plt, "figure", as_in_a_notebook)
    plt.ioff()
    try:
        plots.figure()
        assert plt.isinteractive()
    finally:
        plt.ioff()


def test_more_than_100_dots_an_inch_are_refused():
    assert plots.figure(dpi=100)[0].dpi == 100
    with pytest.raises(ValueError, match="dpi=150"):
        plots.figure(dpi=150)


def test_no_two_looks_share_a_colour_a_marker_or_a_dash():
    for column in zip(*plots.LOOKS, strict=True):
        assert len(set(map(str, column))) == len(plots.LOOKS)


# --- saving ------------------------------------------------------------------------------------------


def test_saving_finds_the_repository_from_a_folder_inside_it(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks" / "deep")
    fig, _ = plots.figure(width=2.0, height=1.0)
    assert plots.save(fig, "00_map") == "figures/00_map.png"
    assert plots.save(fig, "00_map.png") == "figures/00_map.png"
    assert [p.name for p in (tmp_path / "figures").iterdir()] == ["00_map.png"]
    picture = imread(tmp_path / "figures" / "00_map.png")
    assert picture.shape[1] < 220 and np.allclose(picture[0, 0], 1.0)  # opaque white in the corner


def test_saving_without_a_repository_uses_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plots.save(plots.figure()[0], "a")
    assert (tmp_path / "figures" / "a.png").is_file()


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a\\b", ".png"])
def test_saving_under_a_name_that_is_a_path_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="plain file name"):
        plots.save(plots.figure()[0], name)


# --- live curves -------------------------------------------------------------------------------------


class Screen:
    """What a notebook's front end was told."""

    def __init__(self) -> None:
        self.shown, self.updated = [], []

    def display(self, fig, *, display_id):
        assert display_id is True
        self.shown.append(fig)
        return self

    def update(self, fig):
        self.updated.append([[list(line.get_ydata()) for line in ax.lines] for ax in fig.axes])


@pytest.fixture
def screen(monkeypatch):
    pytest.importorskip("IPython")
    screen = Screen()
    monkeypatch.setattr("IPython.display.display", screen.display)
    monkeypatch.setattr(plots.live, "_in_notebook", lambda: True)
    return screen


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(plots.live.time, "monotonic", lambda: now[0])
    return now


def test_a_live_plot_displays_once_and_then_updates_that_display_at_most_twice_a_second(screen, clock):
    live = plots.LiveCurves({"loss": ["nats"]}, total=100)
    for done in range(1, 101):
        clock[0] += 0.1
        assert live(None, done, {"nats": 1 / done}) is None
    assert len(screen.shown) == 1 and 10 <= len(screen.updated) <= 20
    live.close()
    assert len(screen.shown) == 1
    assert screen.updated[-1][0][0] == [1 / done for done in range(1, 101)]


def test_a_fast_loop_is_drawn_when_it_ends(screen, clock):
    with plots.LiveCurves({"loss": ["nats"]}) as live:
        live(None, 1, {"nats": 3.0})
        live(None, 2, {"nats": 1.0})
        assert screen.updated == []
    assert len(screen.updated) == 1
    assert screen.updated[0][0][0] == [3.0, 1.0]
    live.close()
    assert len(screen.updated) == 1


def test_redrawing_takes_a_tenth_of_the_time_at_most(screen, clock, monkeypatch):
    live = plots.LiveCurves({"loss": ["nats"]})
    draw = live._draw

    def slowly() -> None:
        clock[0] += 1.0
        draw()

    monkeypatch.setattr(live, "_draw", slowly)
    began = clock[0]
    for done in range(1, 1001):
        clock[0] += 0.1
        live(None, done, {"nats": 1.0})
    assert 5 <= len(screen.updated) <= 0.11 * (clock[0] - began)


def test_a_live_plot_is_not_shown_a_second_time_at_the_end_of_its_cell(screen):
    plots.LiveCurves({"loss": ["nats"]})
    assert plt.get_fignums() == []


def test_outside_a_notebook_a_live_plot_is_silent_and_can_be_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with plots.LiveCurves({"loss": ["nats"]}) as live:
        live(None, 1, {"nats": 2.0})
    plots.save(live.figure, "loss")
    assert capsys.readouterr() == ("", "")
    assert live.figure.axes[0].lines[0].get_ydata() == [2.0]


def test_an_error_inside_the_loop_still_draws_the_last_state_and_passes_on(screen, clock):
    with pytest.raises(ZeroDivisionError), plots.LiveCurves({"loss": ["nats"]}) as live:
        live(None, 1, {"nats": 2.0})
        1 / 0  # noqa: B018
    assert screen.updated[-1][0][0] == [2.0]


def test_updates_without_a_metric_are_passed_over():
    live = plots.LiveCurves({"eval": ["eval/answer"]})
    for done, metrics in enumerate(
        [{}, {"eval/answer": 0.5}, {"eval/answer": math.nan}, {"eval/answer": 1}], 1
    ):
        live(None, done, metrics)
    assert live.series("eval", "eval/answer") == ([2, 4], [0.5, 1.0])


def test_a_players_panel_holds_its_own_updates_only_and_a_prefix_asks_for_others():
    names = ["reward", "generator:reward"]
    live = plots.LiveCurves({"verifier": names, "both": names})
    live(None, 1, {"turn": "generator", "reward": 0.1})
    live(None, 2, {"turn": "verifier", "reward": 0.9})
    assert live.series("verifier", "reward") == ([2], [0.9])
    assert live.series("verifier", "generator:reward") == ([1], [0.1])
    assert live.series("both", "reward") == ([1, 2], [0.1, 0.9])
    assert live.series("both", "generator:reward") == ([1], [0.1])


def test_a_loop_that_names_no_turn_fills_a_players_panel():
    live = plots.LiveCurves({"generator": ["reward"]})
    live(None, 1, {"reward": 0.1})
    assert live.series("generator", "reward") == ([1], [0.1])


def test_curves_show_points_and_a_running_mean_and_differ_in_more_than_colour():
    with plots.LiveCurves({"p": ["a", "b"]}, total=4, title="Run", window=2) as live:
        for done, value in enumerate([0.0, 2.0, 4.0, 0.0], 1):
            live(None, done, {"a": value, "b": 1.0})
    (ax,) = live.figure.axes
    points, mean = ax.lines[:2]
    assert list(points.get_xdata()) == [1, 2, 3, 4] and list(points.get_ydata()) == [0, 2, 4, 0]
    assert list(mean.get_ydata()) == [0, 1, 3, 2]
    handles = ax.get_legend().legend_handles
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert len({h.get_marker() for h in handles}) == len({h.get_linestyle() for h in handles}) == 2
    assert live.figure.get_suptitle() == "Run: update 4 of 4"
    low, high = ax.get_ylim()
    assert low <= 0 and high >= 4 and ax.get_xlim()[1] >= 4


def test_the_size_of_a_live_figure_does_not_depend_on_what_is_drawn():
    live = plots.LiveCurves({"p": ["a"], "q": ["b"]})
    before = repr(live.figure)
    live(None, 1, {"a": 1e9, "b": -5.0})
    live.close()
    assert repr(live.figure) == before == "<Figure size 900x320 with 2 Axes>"


@pytest.mark.parametrize("panels", [{}, {"a": []}, {"a": "reward"}])
def test_panels_without_metrics_are_refused(panels):
    with pytest.raises(ValueError, match="panels"):
        plots.LiveCurves(panels)


def test_a_running_mean_is_a_mean_of_slices():
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    expected = [np.mean(values[max(0, i - 2) : i + 1]) for i in range(6)]
    assert plots.running_mean(values, 3) == pytest.approx(expected)


# --- curves over seeds -------------------------------------------------------------------------------


def row(arm, seed, update, value, learned=None, seconds=0.0) -> dict:
    learned = update if learned is None else learned
    return {
        "arm": arm,
        "seed": seed,
        "update": update,
        "learned": learned,
        "seconds": seconds,
        "eval/answer": value,
    }


ROWS = [
    row("outcome only", 0, 0, 0.2), row("outcome only", 1, 0, 0.4),
    row("outcome only", 0, 20, 0.5), row("outcome only", 1, 20, 0.8),
    row("tango", 0, 0, "0.2"), row("tango", 1, 0, "0.4"),
    row("tango", 0, 20, "0.9"), row("tango", 1, 20, "1.0"),
]  # fmt: skip


def test_lines_are_means_over_seeds_and_bands_reach_from_least_to_greatest():
    ax = plots.curves_over_seeds(ROWS, "eval/answer")
    first, second = ax.lines
    assert list(first.get_xdata()) == [0, 20]
    assert list(first.get_ydata()) == pytest.approx([0.3, 0.65])
    assert list(second.get_ydata()) == pytest.approx([0.3, 0.95])
    corners = ax.collections[0].get_paths()[0].vertices
    assert {round(y, 6) for x, y in corners if x == 20} == {0.5, 0.8}
    assert ax.get_ylabel() == "answer"


def test_every_arm_has_a_colour_a_marker_a_dash_and_its_name_at_the_end_of_its_line():
    ax = plots.curves_over_seeds(ROWS, "eval/answer")
    for key in ("get_color", "get_marker", "get_linestyle"):
        assert len({getattr(line, key)() for line in ax.lines}) == 2
    named = {text.get_text(): text.xy for text in ax.texts}
    assert named["outcome only"] == pytest.approx((20, 0.65))
    assert named["tango"] == pytest.approx((20, 0.95))


def test_names_of_lines_that_end_together_do_not_overlap_and_stay_inside():
    rows = [row(f"arm {i}", 0, u, 0.9) for i in range(5) for u in (0, 20)]
    ax = plots.curves_over_seeds([*rows, row("low", 0, 0, 0.0)], "eval/answer")
    ax.figure.canvas.draw()
    boxes = sorted((Text.get_window_extent(name) for name in ax.texts), key=lambda box: box.y0)
    assert len(boxes) == 6
    assert all(below.y1 <= above.y0 + 1 for below, above in pairwise(boxes))
    assert max(text.get_position()[1] for text in ax.texts) <= 1.0


def test_of_several_evaluations_at_one_count_the_latest_stands():
    rows = [
        row("tango", 0, 40, 0.6, learned=0),
        row("tango", 0, 0, 0.2, learned=0),
        row("tango", 0, 43, 0.7, learned=3),
    ]
    (line,) = plots.curves_over_seeds(rows, "eval/answer").lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 3], [0.6, 0.7])


def test_seeds_are_matched_by_update_where_the_axis_is_seconds():
    rows = [
        row("a", s, u, v, seconds=t)
        for s, u, v, t in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 9, 1, 10), (1, 9, 0, 14)]
    ]
    (line,) = plots.curves_over_seeds(rows, "eval/answer", x="seconds").lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 12], [0, 0.5])


def test_empty_cells_and_nan_are_left_out_and_arms_choose_and_order():
    rows = [*ROWS, row("tango", 0, 30, ""), row("tango", 0, 40, "nan"), row("tango", 0, 50, None)]
    fig, (ax,) = plots.figure()
    assert plots.curves_over_seeds(rows, "eval/answer", ax=ax, arms=["tango", "outcome only"]) is ax
    assert [line.get_label() for line in ax.lines] == ["tango", "outcome only"]
    assert list(ax.lines[0].get_xdata()) == [0, 20]
    assert plt.get_fignums() == [fig.number]


def test_asking_for_an_unknown_arm_or_metric_says_what_there_is():
    with pytest.raises(ValueError, match="tango"):
        plots.curves_over_seeds(ROWS, "eval/answer", arms=["grpo"])
    with pytest.raises(ValueError, match="eval/nothing"):
        plots.curves_over_seeds(ROWS, "eval/nothing")


# --- strips ------------------------------------------------------------------------------------------


def test_a_step_strip_says_text_verdict_truth_and_agreement_in_words():
    fig = plots.step_strip(["2+2=4", "4*$2=9"], [True, True], [True, False], ends=[7, 15])
    said = words(fig)
    assert {"2+2=4", "4*$2=9", "7", "15", "ends at token"} <= set(said)
    assert [w for w in said if w.endswith("CORRECT")] == ["✓ CORRECT", "✓ CORRECT"]
    assert [w for w in said if w.endswith(("true", "false"))] == ["✓ true", "✗ false"]
    assert [w for w in said if w.lower() in ("agrees", "disagrees")] == ["agrees", "DISAGREES"]
    fig.canvas.draw()  # a lone dollar sign is no formula


def test_an_incorrect_verdict_differs_in_mark_word_and_hatch():
    fig = plots.step_strip(["a", "b"], [True, False])
    hatches = [patch.get_hatch() for patch in fig.axes[0].patches]
    assert [w for w in words(fig) if "CORRECT" in w] == ["✓ CORRECT", "✗ INCORRECT"]
    assert len([hatch for hatch in hatches if hatch]) == 1
    assert not {"truth", "ends at token"} & set(words(fig))


def test_a_verification_that_could_not_be_read_is_no_verdict():
    said = words(plots.step_strip(["a", "b"], None, [True, False]))
    assert said.count("? NOT READ") == said.count("no verdict") == 2
    assert not [w for w in said if "CORRECT" in w]


@pytest.mark.parametrize("lists", [([True],), ([True, True], [True]), ([True, True], None, [3])])
def test_a_step_strip_refuses_lists_of_other_lengths(lists):
    verdicts, truth, ends = (*lists, None, None)[:3]
    with pytest.raises(ValueError, match="for 2 steps"):
        plots.step_strip(["a", "b"], verdicts, truth, ends=ends)


def test_a_token_strip_writes_every_token_and_its_number():
    fig = plots.token_strip(["<step>", " ", "x", "\n", "$y"], [0.2, 0.0, -0.4, None, math.nan], title="A")
    said = words(fig)
    assert said == ["<step>", "+0.2", "·", "0", "x", "-0.4", "↵", "$y"]
    assert fig.axes[0].get_title("left") == "A"
    fig.canvas.draw()


def test_token_colours_grow_lighter_with_the_number_so_that_grey_says_the_same():
    values = [-1.0, -0.5, 0.0, 0.5, 1.0]
    boxes = list(plots.token_strip(list("abcde"), values, title="").axes[0].patches)
    light = [luminance(box.get_facecolor()) for box in boxes]
    assert all(isinstance(box, Rectangle) for box in boxes) and len(boxes) == 5
    assert all(above - below > 0.1 for below, above in pairwise(light))


def test_zero_has_one_colour_whatever_the_range():
    boxes = [
        plots.token_strip(["a", "b"], [0.0, top], title="").axes[0].patches[0]
        for top in (0.1, 5.0, -3.0, 0.0)
    ]
    assert len({to_hex(box.get_facecolor()) for box in boxes}) == 1


def test_the_text_on_a_token_stands_out_from_its_colour():
    values = list(np.linspace(-1, 1, 21))
    ax = plots.token_strip(["x"] * 21, values, title="").axes[0]
    letters = [text for text in ax.texts if text.get_text() == "x"]
    for box, letter in zip(ax.patches, letters, strict=True):
        assert abs(luminance(box.get_facecolor()) - luminance(letter.get_color())) > 0.35


def test_long_strips_go_on_in_new_lines_inside_the_frame():
    fig = plots.token_strip(["token"] * 60, [0.1] * 60, title="", width=50)
    ax = fig.axes[0]
    corners = [box.get_xy() for box in ax.patches]
    assert len({y for _, y in corners}) == 8 and len(set(corners)) == 60
    assert all(x + box.get_width() <= 50 for (x, _), box in zip(corners, ax.patches, strict=True))
    assert ax.get_ylim()[0] < min(y for _, y in corners)


@pytest.mark.parametrize(("tokens", "values"), [(["a"], []), ([], [])])
def test_a_token_strip_refuses_what_does_not_pair_up(tokens, values):
    with pytest.raises(ValueError, match="one value for each token"):
        plots.token_strip(tokens, values, title="")


# --- single ideas ------------------------------------------------------------------------------------


def test_a_group_is_shown_with_its_numbers_and_its_signs_without_colour():
    fig = plots.group_panel([1.0, 0.0], [0.7, -0.7], [[0.5, 0.2], [0.1]])
    shown = words(fig)
    assert len(fig.axes) == 3 and {"1", "0", "0.7", "-0.7"} <= set(shown)
    hatched = [bar.get_hatch() is not None for bar in fig.axes[1].patches]
    assert hatched == [False, True]
    lines = fig.axes[2].lines[:2]
    assert [list(line.get_ydata()) for line in lines] == [[0.5, 0.2], [0.1]]
    assert len(plots.group_panel([1.0], [0.0]).axes) == 2
    with pytest.raises(ValueError, match="advantage has 1 entries for 2"):
        plots.group_panel([1.0, 0.0], [0.7])


def test_a_verifiers_panel_counts_its_verdicts_and_bins_its_votes():
    pairs = [(1.0, True), (0.75, True), (0.25, True), (0.1, False), (0.9, False), (0.5, False)]
    fig = plots.verifier_panel({"before": pairs})
    table, curve = fig.axes
    # half of the votes is not more than a half, so it is the verdict INCORRECT
    assert words(fig)[:4] == ["2\n67%", "1\n33%", "1\n33%", "2\n67%"]
    line = curve.lines[1]
    places, values = line.get_xdata(), line.get_ydata()
    assert np.allclose(places, [0.1, 0.25, 0.5, 0.75, (1.0 + 0.9) / 2]) and np.allclose(
        values, [0, 1, 0, 1, 0.5]
    )
    assert table.get_title(loc="left") == "before"
    with pytest.raises(ValueError, match="pairs"):
        plots.verifier_panel({"before": []})


def test_a_moment_without_right_solutions_says_none():
    fig = plots.verifier_panel({"now": [(0.0, False)]})
    assert words(fig).count("none") == 2


def test_variances_stand_on_a_logarithmic_scale_and_zero_is_left_out():
    fig = plots.kl_variance([0.0, 1.0], {"k1": [0.0, 2.0], "k3": [0.1, 5.0]}, xlabel="distance")
    (ax,) = fig.axes
    assert ax.get_yscale() == "log" and ax.get_ylabel() == "variance"
    assert math.isnan(ax.lines[0].get_ydata()[0]) and list(ax.lines[1].get_ydata()) == [0.1, 5.0]
    with pytest.raises(ValueError, match="k1 has 1 variances for 2"):
        plots.kl_variance([0, 1], {"k1": [1.0]}, xlabel="distance")


@pytest.mark.parametrize(("method", "said"), [("tango", "verifier"), ("covrl", "posterior")])
def test_a_method_is_drawn_with_every_word_inside_the_figure(method, said):
    fig = plots.architecture(method)
    fig.canvas.draw()
    assert any(said in text for text in words(fig))
    frame, drawn = fig.bbox, [text.get_window_extent() for text in fig.axes[0].texts]
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in drawn)
    assert all(frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in drawn)


def test_there_is_no_picture_of_an_unknown_method():
    with pytest.raises(ValueError, match="tango and of covrl"):
        plots.architecture("ppo")


def test_two_players_keep_an_arms_look_on_both_sides():
    rows = [
        {"arm": arm, "seed": 0, "learned": at, "answer": 0.5, "judged": judged}
        for arm, judged in (("alone", ""), ("tango", 0.9))
        for at in (0, 20)
    ]
    fig = plots.two_players(rows, "answer", "judged")
    left, right = fig.axes
    (there,) = (line for line in left.lines if line.get_label() == "tango")
    (here,) = right.lines
    assert here.get_color() == there.get_color() and here.get_marker() == there.get_marker()
