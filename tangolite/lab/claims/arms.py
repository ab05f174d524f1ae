"""What is trained: every arm by name, and what differs from its recipe."""

from __future__ import annotations

from typing import NamedTuple

WARMUP, GENERATOR, LONG = (
    60,
    60,
    240,
)  # verifier warm-up updates; generator updates of most arms, and of the long one


class Arm(NamedTuple):
    """One way of training: a name, what it is, its family, and what differs from the family's recipe.

    ``counts`` is the player whose updates are counted on the horizontal axis.  ``after`` names an arm whose
    finished run this one goes on from (the same verifier warm-up, then something else): exactly what it would
    have got by itself, since every update draws from its seed and number alone.  ``meets`` names an arm
    whose trained generator the verifier is shown at the end.
    """

    name: str
    what: str
    family: str
    changes: dict
    counts: str = "generator"
    after: str | None = None
    meets: str | None = None

    @property
    def slug(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.name.lower()).replace("--", "-").strip("-")


def _tango(name: str, what: str, updates: int = GENERATOR, **changes) -> Arm:
    """No verifier updates at all."""
    return Arm(name, what, "tango", {"verifier_updates": "never", "updates": updates} | changes)


def _warmed(name: str, what: str, frozen: bool = False, after: str = "warm-up", **changes) -> Arm:
    """After the verifier's warm-up; then three generator updates to one of the verifier, unless frozen."""
    schedule = {"verifier_updates": "warmup" if frozen else "always", "verifier_warmup": WARMUP}
    updates = WARMUP + (GENERATOR if frozen else GENERATOR * 4 // 3)
    return Arm(name, what, "tango", schedule | {"updates": updates} | changes, after=after)


def _verifier(
    name: str, what: str, updates: int, after: str | None = None, meets: str | None = None, **changes
) -> Arm:
    """The verifier alone; the generator stays as it began."""
    alone = {"verifier_warmup": updates, "updates": updates}
    return Arm(name, what, "tango", alone | changes, counts="verifier", after=after, meets=meets)


NONE = {"step_source": "none"}
# The whole recipe that the paper's authors give REINFORCE++; its alpha of 0.5 is tango-tiny's as well.
PLUSPLUS = {"estimator": "reinforce++", "kl_kind": "k2", "entropy_coef": 0.0}

TANGO = (
    _verifier("warm-up", "the verifier's warm-up, which the arms below begin with", WARMUP),
    _tango("outcome only", "GRPO on the answer alone, four times as long as the others", LONG, **NONE),
    _tango("outcome only, gated", "the same, paid only after steps that do what the question asks", gate=True, **NONE),
    _tango("gold steps", "true step labels in the verifier's place (a yardstick)", step_source="truth"),
    _tango("frozen weak", "step rewards of the untrained verifier"),
    _warmed("frozen warmed", "step rewards of a verifier trained by RL, then frozen", frozen=True),
    _warmed("tango", "both learn, three updates to one"),
    _verifier("frozen generator", "the verifier alone, as many updates as in Tango",
              WARMUP + GENERATOR // 3, "warm-up", meets="tango"),
    _warmed("alpha 0.5 fixed", "Tango, alpha held at 0.5", alpha_schedule="none"),
    _warmed("alpha 0.1 fixed", "Tango, alpha held at 0.1", alpha=0.1, alpha_schedule="none"),
    _warmed("alpha 0.1 decayed", "Tango, alpha from 0.1 to 0.001 (the paper's)", alpha=0.1, alpha_min=0.001),
    _verifier("warm-up, rloo", "the warm-up with RLOO", WARMUP, estimator="rloo"),
    _warmed("tango, rloo", "Tango with RLOO", after="warm-up, rloo", estimator="rloo"),
    _tango("outcome only, rloo", "outcome only with RLOO", estimator="rloo", **NONE),
    _verifier("warm-up, reinforce++", "the warm-up with REINFORCE++ and k2", WARMUP, **PLUSPLUS),
    _warmed("tango, reinforce++", "Tango with REINFORCE++ and k2", after="warm-up, reinforce++", **PLUSPLUS),
    _tango("outcome only, reinforce++", "outcome only with REINFORCE++ and k2", **PLUSPLUS, **NONE),
    *(Arm(name, f"the verifier on hard questions, of which one try in eight ends right; {what}", "hard",
          {"verifier_warmup": 40, "updates": 40, "class_weights": method}, counts="verifier")
      for name, method, what in (("no class weights", "none", "all samples alike"),
                                 ("weights 1/sqrt(count)", "sqrt_inverse", "the paper's weights"),
                                 ("weights 1/count", "inverse", "the recipe's weights"))),
    _warmed("paid by verdicts", "the warmed verifier, frozen, pays for its final judgement alone",
            frozen=True, final_weight=0.0, alpha=0.0, alpha_schedule="none"),
    Arm("paid by scores", "a head that was taught right from wrong by labels, frozen, pays its probability",
        "scores", {"verifier_updates": "never", "updates": GENERATOR} | NONE),
)  # fmt: skip


def _covrl(name: str, what: str, family: str = "covrl", **changes) -> Arm:
    return Arm(name, what, family, changes, counts="policy")


EXACT = {"kl_estimator": "exact"}
COVRL = (
    _covrl("covrl", "the paper's objective, alpha 0.5, the sampler's density detached", updates=2 * GENERATOR),
    _covrl("prior only", "alpha 1.0: the answer's likelihood as reward, no posterior", alpha=1.0,
           updates=2 * GENERATOR),
    _covrl("sampling alpha 0.1", "nine traces in ten from the posterior", alpha=0.1),
    _covrl("sampling alpha 0.9", "nine traces in ten from the prior", alpha=0.9),
    _covrl("KL coefficient 0.1", "a tenth of the KL", kl_coef=0.1),
    _covrl("NLL coefficient 0.1", "a tenth of the likelihood term", nll_coef=0.1),
    _covrl("sum of log-probs", "reward: the sum over the answer's tokens", reward="sum_logp"),
    _covrl("mean of probs", "reward: the mean probability of the answer's tokens", reward="mean_prob"),
    _covrl("sum of probs", "reward: the sum of their probabilities", reward="sum_prob"),
    _covrl("exact KL", "the KL summed over the vocabulary in place of the estimate", **EXACT),
    _covrl("KL balanced", "a named deviation: exact KL that does not move the posterior", kl_gradient="prior", **EXACT),
    _covrl("density not held", "the estimate differentiated through the sampler's density as well", "live"),
)  # fmt: skip

ARMS = {arm.name: arm for arm in (*TANGO, *COVRL)}
