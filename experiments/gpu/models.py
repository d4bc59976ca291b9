"""Checkpoints from built-in shapes, and engines over them."""

import json
from pathlib import Path
from typing import Any

import torch

from gpu import Context
from lab import LLM
from lab.settings import (
    CacheSettings,
    CompileSettings,
    DebugSettings,
    ModelSettings,
    PluginChoice,
    SchedulerSettings,
    Settings,
)

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _shape(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
    names += ["num_attention_heads", "num_key_value_heads"]
    return _LLAMA | dict(zip(names, (vocab, hidden, inner, layers, heads, kv_heads), strict=True)) | more


LONG = {"max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
TINY = {"max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32"}
SHAPES = {
    "llama-3-8b": _shape(128256, 4096, 14336, 32, 32, 8, **LONG),
    "smollm2": _shape(49152, 576, 1536, 30, 9, 3, **{**LONG, "rope_theta": 100000.0, "tie_word_embeddings": True}),
    "gqa4": _shape(2048, 512, 1024, 4, 8, 2, **TINY),  # head dim 64
    "gqa3": _shape(2048, 576, 1024, 3, 9, 3, **TINY),
    "wide": _shape(1024, 512, 512, 2, 4, 4, **TINY),  # head dim 128, no groups
    "tiny": _shape(128, 32, 64, 2, 4, 2, **TINY),
}


def dummy(context: Context, name: str) -> Path:
    """A folder with nothing but the config, for load_format=dummy."""
    folder = context.work / f"dummy-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return folder


def random_checkpoint(context: Context, name: str) -> Path:
    """A folder with random weights in float32, spread so that most greedy choices are clear."""
    folder = context.work / f"random-{name}"
    if folder.exists():
        return folder
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[name], initializer_range=SHAPES[name]["hidden_size"] ** -0.5))
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.mul_(3)
    model.save_pretrained(folder)
    return folder


def settings_for(context: Context, folder: Path, **given: Any) -> Settings:
    """Settings with the parts that matter here by short names."""
    spec = given.get("spec", "none")
    max_rows, invariant = given.get("max_rows", 16), given.get("invariant", False)
    on_the_cpu = "eager" if invariant else "sdpa"
    sizes = given.get("sizes", tuple(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= max_rows))
    mode = given.get("compile", "none" if context.is_dry else "piecewise")
    return Settings(
        model=ModelSettings(str(folder), given.get("dtype", "bfloat16"), load_format=given.get("load_format", "auto")),
        cache=CacheSettings(
            num_blocks=given.get("num_blocks"), enable_prefix_caching=False, memory_utilization=given.get("utilization", 0.9)
        ),
        scheduler=SchedulerSettings(
            max_num_batched_tokens=given.get("budget", 2048), max_num_seqs=max_rows, async_scheduling=given.get("async_", True)
        ),
        compile=CompileSettings(
            mode=mode,
            cudagraph_mode=given.get("graphs", "auto"),
            capture_sizes=sizes,
            cache_dir=str(context.work / "compiled"),
        ),
        debug=DebugSettings(batch_invariant=invariant),
        attention=PluginChoice(given.get("attention", on_the_cpu if context.is_dry else "flash")),
        spec=PluginChoice(spec),
        device=context.device,
        num_threads=1 if context.is_dry else None,
    )


def open_llm(context: Context, folder: Path, **given: Any) -> LLM:
    return LLM(settings=settings_for(context, folder, **given))
