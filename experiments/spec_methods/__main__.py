"""Which proposer is worth it for which prompts: tokens per step and speed against no speculation, by category.

    python -m experiments.spec_methods [--spec-bench FILE] [--methods none ngram suffix ...] [--temperature 0 1]

One request at a time; on every prompt all methods take turns, so that a change of the machine's speed meets all of them. A
method is a proposer's name, with overrides after a colon: "ngram:spec.num_drafts=8;draft_length=fixed".
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles

from experiments.speculation.engines import Tally, engines, markdown
from experiments.speculation.plot import lines
from experiments.speculation.sets import Prompts, read_sets
from lab import SamplingParams

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--spec-bench", help="question.jsonl of Spec-Bench; without it, the sets that come with the study")
    parser.add_argument(
        "--methods", nargs="+", default=["none", "ngram", "suffix"], help="the first one is what others are held against"
    )
    parser.add_argument(
        "--categories", nargs="+", help="these alone, for a study in pieces; the last rows are over all of them"
    )
    parser.add_argument("--per-category", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0], help="with several each category has a row for each"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, by its CPU time: for a busy machine")
    parser.add_argument("--override", nargs="*", default=[], help="settings of all engines")
    parser.add_argument("--out", type=Path, default=HERE, help="where plot.svg and results.json go")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sets = by_temperature(chosen(read_sets(given.spec_bench, given.per_category), given.categories), given.temperature)
    with engines(given.methods, given.override, given.model, cpu_time=given.cpu_time) as found:
        base = next(iter(found))
        tallies = {row: {name: Tally() for name in found} for row in sets}
        ratios, costs = defaultdict(list), defaultdict(list)  # of speeds, and of what a step takes
        for llm in found.values():
            for temperature in given.temperature:
                warm = SamplingParams(temperature=temperature, max_tokens=8, seed=0)
                llm.generate(next(iter(sets.values()))[1][0], warm)
        for category, (temperature, prompts) in sets.items():
            params = SamplingParams(temperature=temperature, max_tokens=given.max_tokens, seed=0)
            for number, prompt in enumerate(prompts):
                speeds, steps_s = {}, {}
                names = list(found)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    own = Tally()
                    output = found[name].generate(prompt, params)[0]
                    own.add(output)
                    tallies[category][name].add(output)
                    speeds[name], steps_s[name] = own.speed, own.seconds / max(own.steps, 1)
                for name, speed in speeds.items():
                    if speeds[base] and speed:
                        ratios[category, name].append(speed / speeds[base])
                        costs[category, name].append(steps_s[name] / steps_s[base])
            print(f"{category}: done", flush=True)
    temperature_of = {row: temperature for row, (temperature, _) in sets.items()}
    report(tallies, ratios, base, temperature_of, given.out)
    print("\n" + over_all(tallies, ratios, costs, base, temperature_of))


def chosen(sets: Prompts, categories: list[str] | None) -> Prompts:
    """The sets of these categories, of all without any. Raises SystemExit for one that there is not."""
    if unknown := set(categories or ()) - set(sets):
        raise SystemExit(f"--categories: there is no {', '.join(sorted(unknown))}, only {', '.join(sets)}")
    return {category: prompts for category, prompts in sets.items() if not categories or category in categories}


def over_all(tallies: dict, ratios: dict, costs: dict, base: str, temperature_of: dict[str, float]) -> str:
    """A table of the methods, over all prompts of a temperature: medians, with the quartiles of the speed."""
    rows = []
    for temperature in sorted(set(temperature_of.values())):
        its = [category for category, t in temperature_of.items() if t == temperature]
        for name in (name for name in tallies[its[0]] if name != base):
            speed = [ratio for category in its for ratio in ratios[category, name]]
            cost = [ratio for category in its for ratio in costs[category, name]]
            tokens, steps = (sum(getattr(tallies[category][name], of) for category in its) for of in ("tokens", "steps"))
            low, _, high = quantiles(speed, n=4) if len(speed) > 1 else speed * 3
            rows.append(
                [
                    name,
                    f"{temperature:g}",
                    str(len(speed)),
                    f"{median(speed):.2f} ({low:.2f} to {high:.2f})",
                    f"{tokens / max(steps, 1):.2f}",
                    f"{median(cost):.2f}",
                ]
            )
    return markdown(
        ["method", "T", "prompts", f"speed against {base} (quartiles)", "tokens/step", "a step, in plain ones"], rows
    )


def by_temperature(sets: dict[str, list], temperatures: list[float]) -> dict[str, tuple[float, list]]:
    """The rows of the table: (temperature, prompts) by category, and by temperature where there are several."""
    if len(temperatures) == 1:
        return {category: (temperatures[0], prompts) for category, prompts in sets.items()}
    return {f"{category}, T={t:g}": (t, prompts) for category, prompts in sets.items() for t in temperatures}


def report(tallies: dict, ratios: dict, base: str, temperature_of: dict[str, float], out: Path) -> None:
    names = list(next(iter(tallies.values())))
    others = [name for name in names if name != base]
    rows, results = [], []
    for category, its in tallies.items():
        cells = [category, f"{its[base].speed:.1f}"]
        for name in others:
            tally, found = its[name], ratios[category, name]
            accepted = tally.drafts.metrics() or {"acceptance_rate": 0.0, "mean_accepted_length": 1.0}
            per_step = tally.tokens / max(tally.steps, 1)
            middle = median(found) if found else float("nan")
            cells.append(f"{middle:.2f} ({per_step:.2f}, {accepted['acceptance_rate']:.0%})")
            results.append(
                {
                    "category": category,
                    "method": name,
                    "temperature": temperature_of[category],
                    "ratio": middle,
                    "ratios": found,
                    "tokens_per_step": per_step,
                    **accepted,
                }
            )
        rows.append(cells)
    header = ["category", f"{base}, tok/s", *(f"{name}: ratio (tokens/step, accepted)" for name in others)]
    print("\n" + markdown(header, rows))
    numbered = {name: [(i, r["ratio"]) for i, r in enumerate(x for x in results if x["method"] == name)] for name in others}
    title = "speed against no speculation; categories: " + ", ".join(f"{i} {c}" for i, c in enumerate(tallies))
    (out / "plot.svg").write_text(lines(title, "category", numbered, level=1.0), encoding="utf-8")
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
