"""What debug.batch_invariant costs: decoding and prefilling with it and without, in turns in one process. Prints Markdown.

python experiments/batch_invariant/bench.py [--rounds N] [--threads N] [--model NAME] [--dtype bfloat16|float32]
"""

import argparse
import statistics

from lab import LLM, SamplingParams

DECODES = (1, 16, 64)  # requests at once
CONTEXT, OUTPUT = 128, 24  # of each
PREFILLS = (512, 2048)  # prompt tokens
MODES = {"off": "false", "on": "true"}


def tokens(count: int, seed: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(seed * 7919 + 31 * i + i * i) % 40_000 for i in range(count)]}


def prefill_ms(llm: LLM, count: int, seed: int) -> float:
    """From arrival to the first token."""
    (output,) = llm.generate([tokens(count, seed)], SamplingParams(temperature=0.0, max_tokens=1))
    return output.metrics.ttft_s * 1e3


def step_ms(llm: LLM, count: int, seed: int) -> float:
    """The median time between tokens, of those steps in which every request decodes."""
    prompts = [tokens(CONTEXT, seed * 1000 + i) for i in range(count)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True))
    return statistics.median(gap for output in outputs for gap in output.metrics.itl_s[OUTPUT // 3 :]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args()
    common = [f"model.dtype={args.dtype}", "cache.num_blocks=1024", "attention=flash", "cache.enable_prefix_caching=false"]
    common += [f"num_threads={args.threads}"] if args.threads else []
    engines = {name: LLM(args.model, overrides=[*common, f"debug.batch_invariant={flag}"]) for name, flag in MODES.items()}
    work = {f"decode, {n} at once, {CONTEXT} tokens before each": (step_ms, n) for n in DECODES}
    work |= {f"prefill, {n:,} tokens": (prefill_ms, n) for n in PREFILLS}
    print("| work | off, ms | on, ms | on / off (of medians; of bests) |\n|---|---:|---:|---:|")
    for name, (measure, count) in work.items():
        found = {mode: [] for mode in engines}
        for turn in range(args.rounds + 1):
            for mode, llm in engines.items():
                ms = measure(llm, count, turn)
                if turn:  # the first warms up
                    found[mode].append(ms)
        medians = {mode: statistics.median(values) for mode, values in found.items()}
        ratio, best = medians["on"] / medians["off"], min(found["on"]) / min(found["off"])
        print(f"| {name} | {medians['off']:.1f} | {medians['on']:.1f} | {ratio:.2f}; {best:.2f} |", flush=True)
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
