"""Figures: live curves, curves over seeds, the verdicts on a solution, numbers on tokens.

Colours are those of Okabe and Ito, and nothing is said by colour alone: every line also has a marker and a
dash of its own, every verdict a mark and a word, every coloured token its number.  Backgrounds are white and
all text has an explicit colour, so a figure reads the same in a dark theme and on grey paper.  The figures
come from pyplot: a notebook shows them at the end of the cell that made them.
"""

from tangolite.plots.base import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    LOOKS,
    MAX_DPI,
    ORANGE,
    PAPER,
    PINK,
    SKY,
    VERMILLION,
    Look,
    figure,
    save,
)
from tangolite.plots.flow import architecture
from tangolite.plots.lessons import group_panel, kl_variance, verifier_panel
from tangolite.plots.live import LiveCurves, running_mean
from tangolite.plots.seeds import curves_over_seeds, two_players
from tangolite.plots.strips import step_strip, token_strip

__all__ = [
    "BLUE",
    "FAINT",
    "GREEN",
    "INK",
    "LOOKS",
    "MAX_DPI",
    "ORANGE",
    "PAPER",
    "PINK",
    "SKY",
    "VERMILLION",
    "LiveCurves",
    "Look",
    "architecture",
    "curves_over_seeds",
    "figure",
    "group_panel",
    "kl_variance",
    "running_mean",
    "save",
    "step_strip",
    "token_strip",
    "two_players",
    "verifier_panel",
]
