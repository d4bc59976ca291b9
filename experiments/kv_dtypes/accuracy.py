"""What a quantized KV cache costs in accuracy: perplexity and KL against the full cache, on the project's own prose.

Every key and value is read back from the cache, those of the token itself included, so one prefill over a window of text gives
the logits that decoding it token by token would give.
"""

import argparse
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab import LLM, SamplingParams
from lab.bench.calibrate import calibrate
from lab.config import compose

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = (  # cache.dtype, cache.scales; a granularity stands for a file of calibrated ranges
    ("bfloat16", "auto"),
    ("int8", "token_head"),
    ("int8", "head"),
    ("int8", "tensor"),
    ("fp8", "token_head"),
    ("fp8", "head"),
    ("fp8", "tensor"),
    ("fp8", "one"),
)


@dataclass
class Sums:
    """Over positions: of log-probabilities and divergences."""

    num: int = 0
    nll: float = 0.0
    kl: float = 0.0
    worst_kl: float = 0.0
    same_top: int = 0


class LogitsTap:
    """Keeps the logits that a model makes."""

    def __init__(self, llm: LLM) -> None:
        self.taken: list[torch.Tensor] = []
        llm.engine.watch(lambda _, call: call, lambda name, call: self._keeping(call) if name == "lm_head" else call)

    def _keeping(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found = call(*args)
            if isinstance(found, torch.Tensor) and found.is_floating_point():
                self.taken.append(found)
            return found

        return run


def logprobs_of(overrides: list[str], args: argparse.Namespace, windows: list[list[int]]) -> Iterator[torch.Tensor]:
    """For each window the log-probabilities of the token after each position but the last, in float32."""
    base = ["model.dtype=float32", "compile.mode=none", "scheduler.async_scheduling=false", "cache.enable_prefix_caching=false"]
    size = [
        f"model.max_model_len={args.window + 1}",
        f"scheduler.max_num_batched_tokens={args.window}",
        "cache.memory_bytes=1000000000",
    ]
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(args.model, attention=args.attention, overrides=[*base, *size, f"num_threads={args.threads}", *overrides]) as llm:
        tap = LogitsTap(llm)
        for window in windows:
            llm.generate({"prompt_token_ids": window}, ask)
            logits_SV = torch.cat(tap.taken)[: len(window) - 1]
            tap.taken.clear()
            yield logits_SV.log_softmax(-1)


def prose() -> str:
    """The project's own documents, one after another."""
    return "\n\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("*/*/README.md"))])


def windows_of(args: argparse.Namespace) -> list[list[int]]:
    with LLM(args.model, overrides=["compile.mode=none", "cache.num_blocks=64"]) as llm:
        token_ids = llm.tokenizer(prose())["input_ids"]
    count = args.tokens // args.window
    assert len(token_ids) >= count * args.window, f"the text has only {len(token_ids)} tokens"
    return [token_ids[i * args.window : (i + 1) * args.window] for i in range(count)]


def compare(found: Iterator[torch.Tensor], full: list[torch.Tensor], windows: list[list[int]]) -> dict[str, float]:
    """Perplexity, and how far the distributions are from those of the full cache (nats)."""
    sums = Sums()
    for logp_SV, wanted_SV, window in zip(found, full, windows, strict=True):
        kl_S = (wanted_SV.exp() * (wanted_SV - logp_SV)).sum(-1)
        sums.num += len(kl_S)
        sums.nll -= logp_SV.gather(1, torch.tensor(window[1:])[:, None]).double().sum().item()
        sums.kl += kl_S.double().sum().item()
        sums.worst_kl = max(sums.worst_kl, kl_S.max().item())
        sums.same_top += int((logp_SV.argmax(-1) == wanted_SV.argmax(-1)).sum())
    return {
        "perplexity": math.exp(sums.nll / sums.num),
        "mean_kl": sums.kl / sums.num,
        "worst_kl": sums.worst_kl,
        "same_top": sums.same_top / sums.num,
    }


def ranges(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Files of ranges over the built-in workload, which is not the text that is measured on."""
    files = {}
    for granularity in ("head", "tensor"):
        path = folder / f"{granularity}.json"
        settings = compose([f"num_threads={args.threads}", "model.max_model_len=2048", "cache.memory_bytes=1000000000"])
        calibrate(settings, path, per_head=granularity == "head")
        files[granularity] = str(path)
    return files


def main() -> None:
    logging.getLogger("lab").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    windows = windows_of(args)
    full = list(logprobs_of([], args, windows))
    rows = [{"dtype": "float32", "scales": ""} | compare(iter(full), full, windows)]
    with tempfile.TemporaryDirectory() as folder:
        files = ranges(args, Path(folder))
        for dtype, scales in VARIANTS:
            overrides = [f"cache.dtype={dtype}", f"cache.scales={files.get(scales, scales)}"]
            rows.append({"dtype": dtype, "scales": scales} | compare(logprobs_of(overrides, args, windows), full, windows))
            rows[-1]["perplexity_ratio"] = rows[-1]["perplexity"] / rows[0]["perplexity"]
            print(rows[-1], flush=True)
    print(rows[0])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
