"""debug.batch_invariant on the device: the same bits for any number of rows and beside any requests, and what that costs."""

import statistics
import struct
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gpu import Context
from gpu.kernels import best_seconds
from gpu.models import open_llm, random_checkpoint
from gpu.steps import PROMPT, generate, models, open_dummy
from lab import SamplingParams
from lab.model.layers import rows
from lab.model.layers.fused import Formulas
from plugins.quant import _triton_linear

ROWS = 300
SPANS = ((0, 1), (299, 300), (7, 9), (0, 16), (63, 65), (100, 228), (1, 300))
LAYERS = ((4096, 6144), (4096, 4096), (14336, 4096), (576, 960), (1536, 576), (72, 50))  # (in, out)
NORMS = (64, 576, 4096)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest entry
TIMED = ((4096, 28672), (14336, 4096), (4096, 128256))
BATCHES = (1, 16, 64, 2048)
WAYS = ({"compile": "none", "graphs": "none"}, {"graphs": "none"}, {"graphs": "full_and_piecewise"})


@torch.inference_mode()
def kernels(context: Context) -> dict[str, Any]:
    """Linear layers and norms: right, and a row's bits the same among any others; then how fast linear layers are."""
    dtypes = (torch.float32,) if context.is_dry else (torch.bfloat16, torch.float16, torch.float32)
    for dtype in dtypes:
        for shape in LAYERS[-1:] if context.is_dry else LAYERS:
            x_TI, w_OI = random(context, ROWS, shape[0], dtype=dtype), random(context, shape[1], shape[0], dtype=dtype)
            judge(
                context,
                f"linear {shape}",
                lambda x, w=w_OI: _triton_linear.multiply(x, w),
                x_TI,
                x_TI.double() @ w_OI.double().T,
            )
        for size in NORMS[:1] if context.is_dry else NORMS:
            x_TD, weight = random(context, ROWS, size, dtype=dtype), random(context, size, dtype=dtype)
            wanted = Formulas().rms_norm(x_TD.float(), weight.float(), 1e-5)
            judge(context, f"norm {size}", lambda x, w=weight: rows.rms_norm(x, w, 1e-5), x_TD, wanted)
        context.keep("invariant-kernels")
    context.say(f"{len(dtypes)} dtypes: linear layers and norms of 1 to {ROWS} rows")
    for shape in LAYERS[-1:] if context.is_dry else TIMED:
        linear_speed(context, shape, dtypes[0])
    return context.result()


def random(context: Context, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(context.device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=context.device).to(dtype)


def judge(context: Context, what: str, call: Any, x: torch.Tensor, wanted: torch.Tensor) -> None:
    """Of one kernel: within rounding of what is wanted, and rows by themselves have the bits that they have among all."""
    together = call(x)
    worst = float((together.double() - wanted.double()).abs().nan_to_num(torch.inf).max() / wanted.abs().max())
    label = f"{what} {str(x.dtype).removeprefix('torch.')}"
    context.check(worst <= TOLERANCE[x.dtype], f"{label}: off by {worst:.1e}")
    spans = SPANS[:3] if context.is_dry else SPANS
    other = [(first, last) for first, last in spans if not torch.equal(call(x[first:last]), together[first:last])]
    context.check(not other, f"{label}: rows {other} have other bits by themselves" if other else f"{label}: the same bits")


def linear_speed(context: Context, shape: tuple[int, int], dtype: torch.dtype) -> None:
    in_features, out_features = shape
    w_OI = random(context, out_features, in_features, dtype=dtype)
    for count in (2,) if context.is_dry else BATCHES:
        x_TI = random(context, count, in_features, dtype=dtype)
        own = best_seconds(context, lambda x=x_TI: _triton_linear.multiply(x, w_OI))
        torchs = best_seconds(context, lambda x=x_TI: F.linear(x, w_OI))
        context.data[f"linear {shape} {count}"] = {"us": own * 1e6, "torch_us": torchs * 1e6}
        context.say(
            f"linear {in_features} to {out_features}, {count} rows: {own * 1e6:.0f} us, {w_OI.nbytes / own / 1e9:.0f} GB/s, "
            f"{2 * count * w_OI.numel() / own / 1e12:.0f} TFLOP/s; torch {torchs * 1e6:.0f} us ({own / torchs:.2f}x)"
        )


def requests(context: Context) -> dict[str, Any]:
    """The tokens and log-probabilities of two requests, alone and beside others, in whatever chunks; and the time of steps."""
    folder = random_checkpoint(context, "tiny" if context.is_dry else "gqa3")
    for way in WAYS[:1] if context.is_dry else WAYS:
        for dtype in ("float32",) if context.is_dry else ("bfloat16", "float16"):
            compare(context, folder, {"dtype": dtype, **way})
            context.keep("invariant")
    name, given = models(context)[0]
    for batch, prompt in ((2, 8),) if context.is_dry else ((16, PROMPT), (1, 4000)):
        ms = {flag: step_ms(context, name, given, batch, prompt, invariant=flag) for flag in (False, True)}
        context.data[f"{name} {batch} x {prompt}"] = {"off_ms": ms[False], "on_ms": ms[True]}
        for what in ("prefill", "decode"):
            off, on = ms[False][what], ms[True][what]
            context.say(f"{name} {batch} x {prompt}, {what}: {off:.2f} ms without, {on:.2f} ms with it ({on / off:.2f}x)")
        context.keep("invariant")
    return context.result()


def compare(context: Context, folder: Path, given: dict[str, Any]) -> None:
    length = 40 if context.is_dry else 150
    vocab = 100
    prompt = [(7 * i + i // 3) % vocab for i in range(length)]
    others = [[(3 * i + j) % vocab for j in range(n)] for i, n in enumerate((1, 17, length // 2, length, 33))]
    asked = [
        SamplingParams(temperature=0.0, max_tokens=8, logprobs=2),
        SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=2),
    ]
    found = []
    for budget, beside in ((2048, []), (2048, others), (31, others)):
        prompts = [*beside, *[prompt] * len(asked)]
        params = [SamplingParams(temperature=1.0, seed=9, max_tokens=12, ignore_eos=True)] * len(beside) + asked
        with open_llm(context, folder, num_blocks=300, budget=budget, invariant=True, **given) as llm:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)[len(beside) :]
        found.append([bits(output) for output in outputs])
    label = " ".join(f"{key}={value}" for key, value in given.items())
    context.check(found[0] == found[1], f"{label}: the same bits alone and beside {len(others)} others")
    context.check(found[0] == found[2], f"{label}: the same bits in chunks")


def bits(output: Any) -> list[Any]:
    (sample,) = output.outputs
    return [[(token, struct.pack("<d", entry.logprob)) for token, entry in place.items()] for place in sample.logprobs]


def step_ms(
    context: Context, name: str, given: dict[str, Any], batch: int, prompt: int, *, invariant: bool
) -> dict[str, float]:
    """The longest step with a prompt in it, the median one that decodes all rows."""
    with open_dummy(context, name, **{**given, "max_rows": 16, "sizes": (1, 16), "invariant": invariant}) as llm:
        generate(llm, batch, prompt, 3)
        steps = generate(llm, batch, prompt, 12)
    decodes = [step["ms"] for step in steps if step["num_tokens"] == batch][2:]
    return {"prefill": max(step["ms"] for step in steps), "decode": statistics.median(decodes)}
