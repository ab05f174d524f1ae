"""The stages of `tangolite.grading`: spelling (`text`), rational numbers (`exact`), units, types (`read`),
and, in a process of its own (`worker`), computer algebra (`algebra`).
"""
