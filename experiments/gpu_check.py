"""Everything that only a GPU can tell, in one call of a few minutes: are the answers right, and how far from the limits.

    python experiments/gpu_check.py                       all sections, results in experiments/gpu/results.json
    python experiments/gpu_check.py --model FOLDER        with that checkpoint (e.g. SmolLM2) beside the built-in shapes
    python experiments/gpu_check.py --sections kernels decode --budget 120
    python experiments/gpu_check.py --dry-run             tiny, on the CPU: whether the script itself works

Needs no network: models are written from built-in shapes with random weights. Each section runs in a process of its own with a
share of the time that is left, so that a fault or a hang in one leaves the others alone. The summary is printed last.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu import SECTIONS, Context  # noqa: E402

ROOM_S = 5  # of the budget kept for the summary


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local folder in transformers' format, checked and measured too")
    parser.add_argument("--output", help="the results (JSON); default: gpu_check.json below $OUT, else gpu/results.json here")
    parser.add_argument(
        "--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), metavar="NAME", help=" ".join(SECTIONS)
    )
    parser.add_argument("--budget", type=float, default=460, help="seconds for all of it (460)")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU, Triton kernels in its interpreter")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # run this one here, and print its result as JSON
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.section:
        context = Context(Path(given.work), given.dry_run, Path(given.model) if given.model else None, given.budget)
        result = SECTIONS[given.section].load()(context)
        Path(given.work, f"{given.section}.json").write_text(json.dumps(result), encoding="utf-8")
        return 0
    output = Path(given.output) if given.output else default_output()
    end = time.monotonic() + given.budget - ROOM_S
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="lab-gpu-check-") as work:
        for position, name in enumerate(given.sections):
            left = end - time.monotonic()
            weights = [SECTIONS[later].weight for later in given.sections[position:]]
            share = left if position == len(given.sections) - 1 else max(left * weights[0] / sum(weights) * 1.5, 10)
            results[name] = run_section(name, given, Path(work), min(share, left))
            save(output, results)
    print(f"\nresults: {output}\n" + summary(results))
    return int(any(result["status"] != "ok" for result in results.values()))


def default_output() -> Path:
    return Path(os.environ["OUT"], "gpu_check.json") if os.environ.get("OUT") else HERE / "gpu" / "results.json"


def run_section(name: str, given: argparse.Namespace, work: Path, seconds: float) -> dict[str, Any]:
    """The section's result, or how it failed, with its seconds."""
    begin = time.monotonic()
    if seconds < 10:
        return {"status": "no time left", "seconds": 0.0}
    print(f"--- {name}: at most {seconds:.0f} s", flush=True)
    command = [sys.executable, __file__, "--section", name, "--work", str(work), "--budget", str(seconds - 5)]
    command += ["--dry-run"] * given.dry_run + (["--model", given.model] if given.model else [])
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if given.dry_run else {**os.environ}
    try:
        done = subprocess.run(
            command, env=environment, timeout=seconds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        text, failure = done.stdout, f"exit status {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired as late:
        text, failure = (late.stdout or b"").decode(errors="replace"), f"stopped after {seconds:.0f} s"
    took = round(time.monotonic() - begin, 1)
    print(text[-6000:], flush=True)
    if failure is None:
        found = json.loads((work / f"{name}.json").read_text(encoding="utf-8"))
        return {"status": "failures" if found.get("failures") else "ok", "seconds": took, **found}
    partial = work / f"{name}.partial.json"
    kept = json.loads(partial.read_text(encoding="utf-8")) if partial.exists() else {}
    return {"status": failure, "seconds": took, "output": text[-3000:], **kept}


def save(output: Path, results: dict[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1), encoding="utf-8")


def summary(results: dict[str, Any]) -> str:
    """A line for each section, then its figures and its failures."""
    lines = []
    for name, result in results.items():
        lines.append(f"{name}: {result['status']} ({result['seconds']} s)")
        lines += [f"    {line}" for line in result.get("lines", [])]
        lines += [f"    FAILED {line}" for line in result.get("failures", [])]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
