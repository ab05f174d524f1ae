"""Our outcome-only GRPO update beside TRL's: `python -m tangolite bench peers`.

Both train the same model on the same prompts, group size, token limit, reward, KL and learning rate, each in a
process of its own, and take turns update by update, so that what else the machine does falls on both alike.  One
update of each is warm-up.  TRL's last batch, with advantages and old log-probs that are far from zero and one
another, is also given to our loss, which must agree.  At last our sampler takes turns with `generate`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tangolite.lab.bench import bench_sampling

BETA, LR = 1e-3, 1e-5


class Size(NamedTuple):
    """A model and how much it is given: prompts, completions of each, tokens of a completion at most."""

    model: str  # "tiny", or "135m"
    questions: int
    group: int
    tokens: int
    threads: int
    task: dict
    prompts: str


SIZES = {
    "tiny": Size("tiny", 16, 8, 80, 1, {"kind": "chain", "steps": 8}, "tiny"),
    "135m": Size("135m", 2, 4, 64, 2, {"kind": "stories", "steps": 2}, "chat"),
}


def bench_peers(names: tuple[str, ...] = ("tiny", "135m"), repeats: int = 5) -> dict:
    """Medians and ranges of ``repeats`` updates of each, in turns; prints as it goes.

    Raises RuntimeError, with what it wrote, if one of the two stops.
    """
    report: dict[str, Any] = {"torch": torch.__version__, "repeats": repeats, "sizes": {}}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            _save_model(SIZES[name], Path(folder) / "model")
            sides = {side: _Side(side, name, folder) for side in ("ours", "trl")}
            for side in sides.values():
                side.ready()
            rows: dict[str, list[dict]] = {side: [] for side in sides}
            for repeat in range(repeats + 1):
                for side, process in sides.items():
                    row = process.update()
                    if repeat:  # the first is warm-up
                        rows[side].append(row)
            ends = {side: process.end() for side, process in sides.items()}
        report["sizes"][name] = _summary(name, rows, ends)
        print(_said(name, report["sizes"][name]), flush=True)
    return report | {"sampling": bench_sampling(sizes=(128,), repeats=repeats)}


def _save_model(size: Size, folder: Path) -> None:
    from tangolite.adapters import smollm2
    from tangolite.checkpoints import save_policy
    from tangolite.models import load_policy

    save_policy(load_policy("tiny-generator" if size.model == "tiny" else smollm2()), folder)


class _Side:
    """One of the two, in a process of its own: it updates once whenever it is told to."""

    def __init__(self, side: str, name: str, folder: str) -> None:
        command = [sys.executable, "-m", "tangolite.lab.bench_peers", side, name, folder]
        env = os.environ | {"OMP_NUM_THREADS": str(SIZES[name].threads), "TOKENIZERS_PARALLELISM": "false"}
        self.log = Path(folder) / f"{side}.log"
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=self.log.open("w"), env=env)  # fmt: skip

    def ready(self) -> None:
        self._read()

    def update(self) -> dict:
        self._tell("update")
        return self._read()

    def end(self) -> dict:
        self._tell("end")
        found = self._read()
        self.process.wait(60)
        return found

    def _tell(self, word: str) -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def _read(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"one side stopped:\n{self.log.read_text()[-2000:]}")


def _summary(name: str, rows: dict[str, list[dict]], ends: dict[str, dict]) -> dict:
    found: dict[str, Any] = {"size": SIZES[name]._asdict()}
    for side, updates in rows.items():
        seconds = [row["seconds"] for row in updates]
        rates = [row["tokens"] / row["seconds"] for row in updates]
        found[side] = {
            "seconds": round(statistics.median(seconds), 4), "range": [round(f(seconds), 4) for f in (min, max)],
            "tokens_per_second": round(statistics.median(rates), 1),
            "tokens_range": [round(f(rates), 1) for f in (min, max)], "peak_mb": ends[side]["peak_mb"],
        }  # fmt: skip
    pairs = [t["seconds"] / o["seconds"] for o, t in zip(rows["ours"], rows["trl"], strict=True)]
    found["times_trl"] = round(statistics.median(pairs), 2)
    return found | {name: ends["trl"][name] for name in ("loss", "loss_difference")}


def _said(name: str, found: dict) -> str:
    lines = [f"{name}: one update, median (range)"]
    for side in ("ours", "trl"):
        row = found[side]
        lines.append(
            f"  {side:5} {row['seconds']:.3f} s ({row['range'][0]:.3f} to {row['range'][1]:.3f}), "
            f"{row['tokens_per_second']:,.0f} tokens/s, peak memory {row['peak_mb']:,.0f} MB"
        )
    lines.append(f"  ours makes {found['times_trl']:.2f} times as many updates; on a batch whose loss is "
                 f"{found['loss']:.3f}, the two losses differ by {found['loss_difference']:.1e}")  # fmt: skip
    return "\n".join(lines)


# --- inside the two processes --------------------------------------------------------------------------


def _wait_for_turn() -> bool:
    return sys.stdin.readline().strip() == "update"


def _say(row: dict) -> None:
    print(json.dumps(row), flush=True)


def _peak_mb() -> float:
    """The most memory that this process held, in MB."""
    import resource

    return round(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3), 1
    )


def run_ours(size: Size, folder: Path) -> None:
    from tangolite.models import load_policy
    from tangolite.tango import Tango, TangoConfig, generator_update

    config = TangoConfig(
        questions=size.questions, group=size.group, max_new_tokens=size.tokens, step_source="none", task=size.task,
        verifier_updates="never", kl_coef=BETA, lr=LR, entropy_coef=0.0, prompts=size.prompts, micro_batch=10**6,
    )  # fmt: skip
    policy = load_policy(folder / "model")
    policy.model.requires_grad_(True)
    run = Tango(config, policy, policy)  # the verifier is never asked

    def update(number: int) -> int:
        metrics = generator_update(run, number)
        return round(metrics["length"] * size.questions * size.group)

    _turns(update)


def _turns(update: Callable[[int], int]) -> None:
    number = 0
    _say({"ready": True})
    while _wait_for_turn():
        began = time.perf_counter()
        tokens = update(number)
        _say({"seconds": time.perf_counter() - began, "tokens": tokens})
        number += 1
    _say({"peak_mb": _peak_mb()})


def run_trl(size: Size, folder: Path) -> None:
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    from tangolite.lab.trl_rewards import outcome_reward
    from tangolite.models import load_policy
    from tangolite.prompts import CHAT, TINY
    from tangolite.tasks import problems, task_of

    task, prompts = task_of(size.task), TINY if size.prompts == "tiny" else CHAT
    tokenizer = load_policy(folder / "model").tokenizer
    asked = problems(task, 16 * size.questions, "0/generator/0")
    shape = (
        (lambda text: text) if size.model == "tiny" else (lambda text: [{"role": "user", "content": text}])
    )
    rows = [{"prompt": shape(prompts.generator(p.question)), "answer": p.answer} for p in asked]

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **_: Any) -> None:
            if not _wait_for_turn():
                peak = _peak_mb()
                loss, difference = _compared(trainer)
                _say({"peak_mb": peak, "loss": loss, "loss_difference": difference})
                os._exit(0)  # in the middle of training, which has no way to end before an update
            self.began = time.perf_counter()

        def on_step_end(self, args, state, control, **_: Any) -> None:
            _say({"seconds": time.perf_counter() - self.began, "tokens": trainer.tokens})

    class Trainer(trl.GRPOTrainer):
        tokens = 0

        def _get_per_token_logps_and_entropies(self, *args: Any, **more: Any):
            self.scores = super()._get_per_token_logps_and_entropies(*args, **more)
            return self.scores

        def compute_loss(self, model, inputs, *args: Any, **more: Any):
            self.tokens, self.last = int(inputs["completion_mask"].sum()), inputs
            return super().compute_loss(model, inputs, *args, **more)

    batch = size.questions * size.group
    args = trl.GRPOConfig(
        str(folder / "out"), per_device_train_batch_size=batch, num_generations=size.group, max_steps=1000,
        max_completion_length=size.tokens, temperature=1.0, learning_rate=LR, lr_scheduler_type="constant", beta=BETA,
        loss_type="bnpo", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", seed=0,
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    data = Dataset.from_list(rows)
    trainer = Trainer(str(folder / "model"), [outcome_reward], args, data, processing_class=tokenizer,
                      callbacks=[Turns()])  # fmt: skip
    _say({"ready": True})
    trainer.train()


def _compared(trainer) -> tuple[float, float]:
    """TRL's loss of its last batch, and how far ours is from it.

    A batch whose rewards are all alike has no advantages, and before an update every ratio is one: any two
    losses would agree there.  So both are given advantages from -1 to 2 and old log-probs that make one ratio
    in two leave the clip range.
    """
    logp, draw = trainer.scores[0].detach(), torch.Generator().manual_seed(0)
    inputs = trainer.last | {
        "advantages": torch.linspace(-1, 2, len(logp)),
        "old_per_token_logps": logp + 0.3 * torch.randn(logp.shape, generator=draw),
    }
    loss = float(trainer.compute_loss(trainer.model, inputs).detach())
    return loss, _loss_difference(loss, trainer.scores[0].detach(), inputs)


def _loss_difference(loss, logp, inputs) -> float:
    """Our loss of a batch of TRL's against TRL's own."""
    from tangolite.losses import aggregate, kl_penalty, policy_loss

    mask = inputs["completion_mask"].bool()
    advantage = inputs["advantages"][:, None].expand_as(logp)
    old = inputs.get("old_per_token_logps")
    ours = policy_loss(logp, logp if old is None else old, advantage, mask).loss
    if inputs.get("ref_per_token_logps") is not None:
        ours = ours + BETA * aggregate(kl_penalty(logp, inputs["ref_per_token_logps"]), mask, "token")
    return abs(float(ours - loss))


if __name__ == "__main__":
    side, name, folder = sys.argv[1:]
    torch.set_num_threads(SIZES[name].threads)
    (run_ours if side == "ours" else run_trl)(SIZES[name], Path(folder))
