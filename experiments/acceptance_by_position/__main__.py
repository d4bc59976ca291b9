"""How often the draft at each position is accepted, by method and set of prompts.

    python -m experiments.acceptance_by_position [--spec-bench FILE] [--methods ngram suffix ...] [--drafts 8]

Every draft is verified (`draft_length=fixed`), so that positions are not chosen by how good they are. Counted are drafts that
were accepted of those that were verified at the position; times do not matter, so all prompts run at once.
"""

import argparse
import json
from pathlib import Path

from experiments.speculation.engines import Tally, engines, markdown
from experiments.speculation.plot import lines
from experiments.speculation.sets import read_sets
from lab import SamplingParams

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--spec-bench", help="question.jsonl of Spec-Bench; without it, the sets that come with the study")
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--drafts", type=int, default=8, help="spec.num_drafts of every method")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--per-category", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--override", nargs="*", default=[], help="settings of all engines")
    parser.add_argument("--out", type=Path, default=HERE, help="where plot.svg and results.json go")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sets = read_sets(given.spec_bench, given.per_category)
    groups = {"copies": [], "free text": [], "Spec-Bench": []}
    for category, prompts in sets.items():
        name = "copies" if category.startswith("copy: ") else category if category in groups else "Spec-Bench"
        groups[name] += prompts
    results = []
    overrides = ["draft_length=fixed", f"spec.num_drafts={given.drafts}", *given.override]
    with engines(given.methods, overrides, given.model) as found:
        for name, llm in found.items():
            for group, prompts in groups.items():
                for temperature in given.temperature if prompts else ():
                    params = SamplingParams(temperature=temperature, max_tokens=given.max_tokens, seed=0)
                    tally = Tally()
                    for output in llm.generate(prompts, params):
                        tally.add_drafts(output)
                    its = tally.drafts.metrics()
                    if its is not None:
                        results.append({"method": name, "set": group, "temperature": temperature, **its})
                print(f"{name}, {group}: done", flush=True)
    header = ["method, prompts, temperature", *(str(i + 1) for i in range(given.drafts)), "alpha", "tokens/verification"]
    rows = []
    for its in results:
        shares = [f"{share:.0%}" for share in its["acceptance_per_position"]]
        label = f"{its['method']}, {its['set']}, {its['temperature']:g}"
        figures = [f"{its['alpha']:.2f}", f"{its['mean_accepted_length']:.2f}"]
        rows.append([label, *shares, *[""] * (given.drafts - len(shares)), *figures])
    print("\n" + markdown(header, rows))
    series = {row[0]: list(enumerate(its["acceptance_per_position"], 1)) for row, its in zip(rows, results, strict=True)}
    plot = lines("share of drafts accepted, by position", "position", series)
    (given.out / "plot.svg").write_text(plot, encoding="utf-8")
    (given.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
