"""What drafts bring by batch size, when they are as good as one says: the roofline's curve, and what the draft length saves.

    python -m experiments.spec_by_batch [--acceptance 0.8] [--drafts 5] [--batches 1 2 4 8 16 32 64] [--shape smollm2|1B|8B]

Every request may put out one token only, so `replay` knows what is right whatever the weights are, and drafts have exactly
the acceptance that is asked for; a shape other than smollm2 is of random weights. Three engines take turns: no drafts, always
all drafts, and as many as the draft length `batch` allows. `--method` puts a proposer and real prompts in the place of
`replay`.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.speculation.copies import prompts as copies
from experiments.speculation.engines import decode_speed, engines, markdown
from experiments.speculation.plot import lines
from lab import LLM, SamplingParams
from lab.metrics.spec import SpecTimes, expected_tokens

HERE = Path(__file__).parent
SHAPES = {  # hidden size, intermediate size, layers, heads, KV heads, head dim: of Llama 3.2 1B and Llama 3.1 8B
    "1B": (2048, 8192, 16, 32, 8, 64),
    "8B": (4096, 14336, 32, 32, 8, 128),
}
VOCABULARY = 128256
TOKEN = 11  # the one that requests may put out


def folder_of(shape: str, num_layers: int | None, folder: Path) -> str:
    """A folder with a config.json of the shape; `num_layers` of its layers, for a machine that cannot hold all."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    config: dict[str, Any] = dict(zip(names, SHAPES[shape], strict=True))
    config |= {"num_hidden_layers": num_layers or config["num_hidden_layers"], "vocab_size": VOCABULARY}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}
    config |= {
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": shape == "1B",
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def batch_of(size: int, method: str | None, prompt_tokens: int) -> list[dict[str, Any]]:
    if method is not None:
        lines_ = copies(size)
        return [{"messages": line["messages"]} for line in lines_]
    rng = np.random.default_rng(size)
    return [{"prompt_token_ids": rng.integers(100, 10000, prompt_tokens).tolist()} for _ in range(size)]


class Watch:
    """The steps of one engine, as the speed-up formula wants them."""

    def __init__(self, llm: LLM) -> None:
        self.times = SpecTimes()
        llm.engine.on_step = lambda line: self.times.add(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--shape", choices=["smollm2", *SHAPES], default="smollm2")
    parser.add_argument("--layers", type=int, help="of the shape: so many of its layers")
    parser.add_argument("--method", help="a proposer on prompts that copy, in the place of replay")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, by its CPU time: for a busy machine")
    parser.add_argument("--override", nargs="*", default=[], help="settings of all engines")
    parser.add_argument("--out", type=Path, default=HERE, help="where the plot and the results go")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    method = given.method or f"replay:spec.acceptance=[{given.acceptance}]"
    drafting = f"{method}{';' if ':' in method else ':'}spec.num_drafts={given.drafts}"
    methods = {"none": "none", "all drafts": f"{drafting};draft_length=fixed", "by batch": f"{drafting};draft_length=batch"}
    overrides = [f"scheduler.max_num_seqs={max(given.batches)}", *given.override]
    with tempfile.TemporaryDirectory() as scratch:
        model = given.shape
        if given.shape != "smollm2":
            model = folder_of(given.shape, given.layers, Path(scratch))
            overrides.append("model.load_format=dummy")
        with engines(list(methods.values()), overrides, model, cpu_time=given.cpu_time) as found:
            rows = measure(dict(zip(methods, found.values(), strict=True)), given)
    report(rows, given)


def measure(found: dict[str, LLM], given: argparse.Namespace) -> list[dict[str, Any]]:
    allowed = None if given.method else (TOKEN,)
    params = SamplingParams(temperature=0.0, max_tokens=given.max_tokens, ignore_eos=True, allowed_token_ids=allowed)
    rows = []
    for size in given.batches:
        prompts = batch_of(size, given.method, given.prompt_tokens)
        watches = {name: Watch(llm) for name, llm in found.items()}
        speeds: dict[str, list[float]] = {name: [] for name in found}
        for llm in found.values():  # shapes of this size are met for the first time, and the draft length learns them
            llm.generate(prompts, params)
        for number in range(given.rounds):
            names = list(found)
            for name in names[number % 3 :] + names[: number % 3]:
                speeds[name].append(decode_speed(found[name], prompts, params))
        ratios = {name: median(a / b for a, b in zip(speeds[name], speeds["none"], strict=True)) for name in found}
        row = {"batch": size, "tok_per_s": median(speeds["none"]), "ratios": ratios, **cost(watches, size)}
        if not given.method:
            row["formula"] = expected_tokens(given.acceptance, given.drafts) / row["verify_cost"]
        rows.append(row)
        print(f"batch {size}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()), flush=True)
    return rows


def cost(watches: dict[str, Watch], size: int) -> dict[str, float]:
    """What a step with drafts takes, in steps without."""
    plain, drafting = watches["none"].times.plain[size], watches["all drafts"].times.drafting[size]
    if not plain or not drafting.count:
        return {"verify_cost": float("nan")}
    return {"verify_cost": (drafting.typical_ms + drafting.draft_ms) / drafting.count / median(plain)}


def report(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    header = ["batch", "no drafts, tok/s", "a step with all drafts, in plain ones", "formula", "all drafts", "by batch"]
    cells = [
        [
            str(row["batch"]),
            f"{row['tok_per_s']:.0f}",
            f"{row['verify_cost']:.2f}",
            f"{row['formula']:.2f}" if "formula" in row else "",
            f"{row['ratios']['all drafts']:.2f}",
            f"{row['ratios']['by batch']:.2f}",
        ]
        for row in rows
    ]
    print("\n" + markdown(header, cells))
    series = {name: [(row["batch"], row["ratios"][name]) for row in rows] for name in ("all drafts", "by batch")}
    if not given.method:
        series["formula"] = [(row["batch"], row["formula"]) for row in rows]
    what = given.method or f"drafts accepted with probability {given.acceptance:g}"
    plot = lines(f"speed against no drafts: {given.shape}, {what}", "batch size", series, log_x=True, level=1.0)
    (given.out / f"plot_{given.shape}.svg").write_text(plot, encoding="utf-8")
    (given.out / f"results_{given.shape}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
