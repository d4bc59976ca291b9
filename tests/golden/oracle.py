"""The truth for greedy outputs: transformers in float32, one request alone."""

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-5  # of the largest logit: nearer ones may be ordered either way by float32 rounding alone


@cache
def hf_model(folder: Path) -> torch.nn.Module:
    """The checkpoint in transformers, float32, eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def greedy(folder: Path, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation; fails when a choice is a near tie, which no implementation could be held to."""
    model = hf_model(folder)
    output = model(torch.tensor([prompt_ids]), use_cache=True, logits_to_keep=1)
    tokens: list[int] = []
    for _ in range(num_tokens):
        best = output.logits[0, -1].topk(2)
        gap = float(best.values[0] - best.values[1])
        place = f"after {len(prompt_ids)} + {len(tokens)} tokens"
        assert gap > NEAR_TIE * float(best.values[0]), f"{place} the best two are {gap:.1e} apart: pick another prompt"
        tokens.append(int(best.indices[0]))
        output = model(torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True)
    return tokens
