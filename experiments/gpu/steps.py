"""Whole steps of the engine: captures, decode steps over the floor, prefill over the peak, launches of a decode step."""

import statistics
import time
from typing import Any

import torch

from gpu import Context
from gpu.machine import facts_of
from gpu.models import dummy, open_llm
from lab import LLM, SamplingParams
from lab.metrics.roofline import Floors, floors

PROMPT = 32
DECODED = 40
BATCHES = (1, 16, 64, 256)
WAYS = (
    {"compile": "none", "graphs": "none"},
    {"graphs": "none"},
    {"graphs": "piecewise"},
    {"graphs": "full_and_piecewise"},
)


def models(context: Context) -> list[tuple[str, dict[str, Any]]]:
    if context.is_dry:
        return [("tiny", {"dtype": "float32", "num_blocks": 200, "budget": 64, "max_rows": 4})]
    return [(name, {"max_rows": max(BATCHES), "budget": 8192, "utilization": 0.8}) for name in ("smollm2", "llama-3-8b")]


def open_dummy(context: Context, name: str, **given: Any) -> LLM:
    return open_llm(context, dummy(context, name), load_format="dummy", **given)


def _floors(context: Context, llm: LLM) -> Floors:
    return floors(llm.engine.model_config, llm.engine.facts.dtype, facts_of(context))


def generate(llm: LLM, batch: int, prompt: int, num_tokens: int) -> list[dict[str, Any]]:
    """The records of the steps."""
    steps: list[dict[str, Any]] = []
    llm.engine.on_step = steps.append
    prompts = [{"prompt_token_ids": [(7 * row + i) % 100 for i in range(prompt)]} for row in range(batch)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    llm.engine.on_step = None
    return steps


def decode(context: Context) -> dict[str, Any]:
    """Start-up, captures and memory; then decode steps at several batch sizes over their floor."""
    for name, given in models(context):
        begin = time.perf_counter()
        with open_dummy(context, name, **given) as llm:
            _report_start(context, name, llm, time.perf_counter() - begin)
            floor = _floors(context, llm)
            for batch in (1, 4) if context.is_dry else BATCHES:
                steps = [s for s in generate(llm, batch, PROMPT, DECODED) if s["num_tokens"] == batch == s["num_requests"]][2:]
                ms = statistics.median(step["ms"] for step in steps)
                period = (steps[-1]["t_s"] - steps[0]["t_s"]) / (len(steps) - 1) * 1e3
                floor_ms = floor.step_s(batch, batch * (PROMPT + DECODED // 2)) * 1e3
                mode = "/".join(sorted({step["mode"] for step in steps}))
                context.data[f"{name} decode {batch}"] = {"ms": ms, "period_ms": period, "floor_ms": floor_ms, "mode": mode}
                context.say(
                    f"{name} decode {batch}: step {ms:.2f} ms, from step to step {period:.2f} ms, floor {floor_ms:.2f} ms "
                    f"({period / floor_ms:.2f}x), {mode}"
                )
                context.keep("decode")
        if not context.is_dry:
            torch.cuda.empty_cache()
    return context.result()


def _report_start(context: Context, name: str, llm: LLM, seconds: float) -> None:
    facts, metrics = llm.engine.startup_s, llm.engine.compile_metrics
    parts = ", ".join(f"{part} {value:.1f}" for part, value in facts.items() if part != "total")
    memory = {} if context.is_dry else {"reserved": torch.cuda.memory_reserved(), "free": torch.cuda.mem_get_info()[0]}
    context.data[f"{name} start"] = {"seconds": seconds, **facts, **metrics, "blocks": llm.engine.blocks.num_blocks, **memory}
    left = f"; {memory['free'] / 2**30:.1f} GiB left free" if memory else ""
    made = f"{metrics['num_captured']} graphs, {llm.engine.blocks.num_blocks} blocks"
    context.say(f"{name} ready in {seconds:.1f} s ({parts}); {made}{left}")


def prefill(context: Context) -> dict[str, Any]:
    """One long prompt in one step: arithmetic rate over the measured peak."""
    for name, given in models(context):
        length = 60 if context.is_dry else 8000
        with open_dummy(context, name, **{**given, "max_rows": 4, "sizes": (1, 2, 4)}) as llm:
            floor = _floors(context, llm)
            steps = [step for _ in range(4) for step in generate(llm, 1, length, 1) if step["num_tokens"] == length]
            ms = min(step["ms"] for step in steps)
            flops = length * floor.flops_per_token + length * length // 2 * floor.attention_flops_per_context_token
            head = 2 * llm.engine.model_config.vocab_size * llm.engine.model_config.hidden_size
            flops -= (length - 1) * head  # logits are made for the last token alone
            share = flops / (ms / 1e3) / floor.peak_flops
            context.data[f"{name} prefill {length}"] = {"ms": ms, "flops_per_s": flops / (ms / 1e3), "of_peak": share}
            context.say(
                f"{name} prefill {length}: {ms:.1f} ms, {flops / ms / 1e9:.0f} TFLOP/s, {share:.0%} of the measured peak"
            )
            context.keep("prefill")
    return context.result()


def launches(context: Context) -> dict[str, Any]:
    """What one decode step launches from the host and runs on the device, with graphs and without."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([] if context.is_dry else [ProfilerActivity.CUDA])]
    name, given = models(context)[0]
    batch, num_tokens = (2, 6) if context.is_dry else (16, 12)
    for way in WAYS[:1] if context.is_dry else WAYS:
        with open_dummy(context, name, **{**given, "max_rows": 16, "sizes": (1, 16), "async_": False, **way}) as llm:
            generate(llm, batch, 8, num_tokens)
            with profile(activities=activities) as profiler:
                steps = generate(llm, batch, 8, num_tokens)
        events = profiler.key_averages()
        counts = {
            "steps": len(steps),
            "kernels": sum(e.count for e in events if e.device_type == torch.autograd.DeviceType.CUDA) / len(steps),
            "launches": sum(e.count for e in events if e.key.startswith(("cudaLaunch", "cuLaunch"))) / len(steps),
            "graphs": sum(e.count for e in events if e.key.startswith("cudaGraphLaunch")) / len(steps),
            "copies": sum(e.count for e in events if e.key.startswith("cudaMemcpy")) / len(steps),
            "waits": sum(e.count for e in events if "Synchronize" in e.key) / len(steps),
        }
        label = " ".join(f"{key}={value}" for key, value in way.items())
        context.data[label] = counts
        described = ", ".join(f"{counts[key]:.1f} {key}" for key in counts if key != "steps")
        context.say(f"{name} batch {batch} {label}: a step has {described}")
        context.keep("launches")
    return context.result()
