"""Greedy tokens against transformers in float32, for every way of running the forward pass."""

from pathlib import Path
from typing import Any

import torch

from gpu import Context
from gpu.models import open_llm, random_checkpoint
from lab import SamplingParams

NUM_TOKENS = 24
ROUNDING = {"float32": 1e-4, "bfloat16": 2**-5, "float16": 2**-8}  # of the largest logit: a gap below it is a near tie
MODES = ("none", "piecewise", "full", "full_decode_only", "full_and_piecewise")
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 130, 200)


def ways(context: Context) -> list[dict[str, Any]]:
    """How the engine is run."""
    eager = [{"compile": "none", "graphs": "none"}]
    if context.is_dry:
        return [*eager, {**eager[0], "async_": False}, {**eager[0], "spec": "ngram"}]
    compiled = [{"compile": "piecewise", "graphs": mode} for mode in MODES]
    return [
        *eager,
        {"compile": "none", "graphs": "full"},
        {"compile": "none", "graphs": "none", "attention": "sdpa"},
        *compiled,
        {**compiled[-1], "async_": False},
        {**compiled[-1], "attention": "sdpa"},
        {**compiled[-1], "spec": "ngram"},
        {**compiled[0], "spec": "ngram"},
    ]


def tokens(context: Context) -> dict[str, Any]:
    """Every way, in float32 and bfloat16, over the built-in models and the user's."""
    names = ("tiny",) if context.is_dry else ("gqa4", "gqa3", "wide")
    folders = [random_checkpoint(context, name) for name in names] + ([context.model] if context.model else [])
    for number, folder in enumerate(folders):
        for dtype in ("float32",) if context.is_dry else ("float32", "bfloat16"):
            oracle = Oracle(folder, dtype, context)
            for way in ways(context) if number == 0 else [*ways(context)[:1], *ways(context)[-4:-2]]:
                if context.time_left < 10:
                    context.failures.append(f"no time for {folder.name} {dtype} {way}")
                    continue
                compare(context, oracle, folder, dtype, way)
                context.keep("tokens")
    return context.result()


class Oracle:
    """transformers in float32, with the weights as the dtype holds them."""

    def __init__(self, folder: Path, dtype: str, context: Context) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
        self.model = model.float().to(context.device).eval()
        self.rounding = ROUNDING[dtype]
        vocab = self.model.config.vocab_size
        draws = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(3, vocab, (n,), generator=draws).tolist() for n in LENGTHS]
        self.prompts.append(self.prompts[3][:8] * 6)  # for drafts to be found in
        self.wanted = [self._greedy(prompt) for prompt in self.prompts]

    @torch.inference_mode()
    def _greedy(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=self.model.device)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def is_near_tie(self, prompt: list[int], before: list[int], one: int, other: int) -> bool:
        """Whether two choices after these tokens lie closer than the dtype can tell apart."""
        logits = self.model(torch.tensor([prompt + before], device=self.model.device)).logits[0, -1]
        return bool((logits[one] - logits[other]).abs() <= self.rounding * logits.abs().max())


def compare(context: Context, oracle: Oracle, folder: Path, dtype: str, way: dict[str, Any]) -> None:
    """One engine: all prompts at once, then one alone."""
    label = f"{folder.name} {dtype} " + " ".join(f"{name.rstrip('_')}={value}" for name, value in way.items())
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    steps: list[dict[str, Any]] = []
    with open_llm(context, folder, dtype=dtype, num_blocks=1000, budget=512, **way) as llm:
        llm.engine.on_step = steps.append
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in oracle.prompts], params)
        alone = llm.generate([{"prompt_token_ids": oracle.prompts[2]}], params)
        metrics = llm.engine.compile_metrics
    found = [output.outputs[0].token_ids for output in [*outputs, *alone]]
    wrong = ties = 0
    for prompt, got, wanted in zip(
        [*oracle.prompts, oracle.prompts[2]], found, [*oracle.wanted, oracle.wanted[2]], strict=True
    ):
        if got == wanted:
            continue
        place = next(i for i, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1])
        is_tie = oracle.is_near_tie(prompt, wanted[:place], got[place], wanted[place])
        ties, wrong = ties + is_tie, wrong + (not is_tie)
    modes = {step["mode"] for step in steps}
    notes = f"{ties} near ties, modes {'/'.join(sorted(modes))}, {metrics['num_captured']} graphs"
    context.check(not wrong, f"{label}: {wrong} of {len(found)} outputs differ ({notes})")
    recompiled = metrics["recompiles_after_warmup"]
    if recompiled:
        context.failures.append(f"{label}: {recompiled} recompiles after warm-up")
    if not context.is_dry and way["graphs"] != "none" and modes == {"none"}:
        context.failures.append(f"{label}: no step ran on a graph")
