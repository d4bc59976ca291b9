"""Time of one call of the sampler, by what is asked for, number of requests and vocabulary size. Prints a Markdown table.

    python experiments/sampling/bench.py [--rows 1 8 64] [--vocab 49152 128256] [--threads 1] [--device cpu]

Logits fall off with the rank of a token as those of a language model do (the nucleus of 0.9 holds about 60 tokens); the
case "flat" draws them from a normal distribution instead, so that the nucleus is thousands wide. The time is the best of
several calls, in milliseconds; the state of the requests moves on from call to call as in a run.
"""

import argparse
import time

import torch

from lab import SamplingParams
from lab.sample.sampler import Sampler

NUM_DRAFTS = 5
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(top_k=50),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_p 0.9, flat": SamplingParams(top_p=0.9),
    "top_k 50, top_p 0.9, min_p 0.05": SamplingParams(top_k=50, top_p=0.9, min_p=0.05),
    "greedy, all penalties, 1,000 tokens": SamplingParams(
        temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1
    ),
    "greedy, logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
    "greedy, 5 drafts": SamplingParams(temperature=0.0),
    "temperature 0.8, 5 drafts": SamplingParams(temperature=0.8),
}


def logits(case: str, num: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Seeded logits, num x vocab_size."""
    generator = torch.Generator().manual_seed(1)
    if "flat" in case:
        return torch.randn(num, vocab_size, generator=generator).to(device)
    rank = torch.rand(num, vocab_size, generator=generator).argsort(-1) + 1.0
    return (-1.5 * rank.log() + 0.5 * torch.randn(num, vocab_size, generator=generator)).to(device)


def best_ms(case: str, rows: int, vocab_size: int, device: torch.device, repeats: int) -> float:
    """The best time of a call for `rows` requests."""
    sampler = Sampler(rows, vocab_size, device)
    history = torch.randint(0, vocab_size, (1000,), generator=torch.Generator().manual_seed(2)).tolist()
    for row in range(rows):
        sampler.add(row, CASES[case], row, frozenset(), history, 500)
    num_drafts = NUM_DRAFTS if "drafts" in case else 0
    logits_LV = logits(case, rows * (1 + num_drafts), vocab_size, device)
    likely = logits_LV.argmax(-1).view(rows, 1 + num_drafts)
    drafts = likely[:, :num_drafts].tolist()
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        sampler.run(logits_LV, list(range(rows)), [num_drafts] * rows, drafts)
        times.append(time.perf_counter() - begin)
    return min(times[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 128256])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    points = [(vocab_size, rows) for vocab_size in given.vocab for rows in given.rows]
    print("| case | " + " | ".join(f"V {vocab_size}, {rows} rows" for vocab_size, rows in points) + " |")
    print("|---|" + "---:|" * len(points))
    with torch.inference_mode():
        for case in CASES:
            cells = [best_ms(case, rows, vocab_size, torch.device(given.device), given.repeats) for vocab_size, rows in points]
            print(f"| {case} | " + " | ".join(f"{ms:.2f}" for ms in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
