"""The papers' claims at small scale: `python -m tangolite claims [NAME] --seeds 5 --out figures/claims`.

`arms` says what is trained, `run` trains it (two arms at a time, resumable), `looks` measures what the core's own
evaluation does not, `entries` holds the claims (question, arms, metric, test, verdict), and `results` writes
CSV, JSON, figures and tables.  `score_model` is the discriminative verifier of the contrast.
"""

from __future__ import annotations

from pathlib import Path

from tangolite.settings import RunError


def run_claims(name: str | None, seeds: int, out: str | Path) -> int:
    """Train what a claim (by name or number), a family ("tango", "covrl") or everything needs, and judge it.

    Goes on where an earlier call stopped.  Raises RunError for an unknown name.
    """
    from tangolite.lab.claims.run import run_arms

    run_arms(arms_for(name), seeds, Path(out))
    from tangolite.lab.claims.results import write_results

    write_results(Path(out))
    return 0


def arms_for(name: str | None) -> list[str]:
    """The arms that a claim, a family or (None) everything needs."""
    from tangolite.lab.claims.arms import ARMS, COVRL, TANGO
    from tangolite.lab.claims.entries import CLAIMS

    families = {None: list(ARMS), "tango": [a.name for a in TANGO], "covrl": [a.name for a in COVRL]}
    if name in families:
        return families[name]
    found = [claim for claim in CLAIMS if name in (claim.name, claim.number)]
    if not found:
        known = ", ".join(claim.name for claim in CLAIMS)
        raise RunError(f"there is no claim {name!r}; there are tango, covrl (all of a method), {known}")
    return [arm for arm in ARMS if arm in found[0].arms]
