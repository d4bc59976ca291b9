"""lab beside the engines one would pick instead, on the CPU: speed, memory and time to be ready, in one run.

    python experiments/peers/run.py
    python experiments/peers/run.py --peers lab llamacpp --workloads w1 --repeats 3

Each peer runs in its own process under its own interpreter: below lab's cache in peers/venvs/NAME, or as told by
`--python NAME=PATH`. Peers that are not installed are skipped. A whole run writes results.json and the tables in README.md;
one of some peers or workloads only prints, or writes to `--output`.
"""

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from harness.floors import WorkloadFloors
from harness.machine import wait_until_quiet
from harness.process import PeerFailed
from harness.session import Plan, Session, num_prompt_tokens
from harness.tables import agreement, render, write_readme
from harness.workloads import SHARED_PREFIX, WORKLOADS, Encode, requests_of

from lab.cache import cache_dir
from lab.engine.tokenizer import load_tokenizer
from lab.errors import UserError, unknown
from lab.metrics.environment import git_state
from lab.metrics.roofline import DeviceFacts, measure_device
from lab.model.config import read_config
from lab.model.once import build_once
from lab.model.source import resolve_model

HERE = Path(__file__).resolve().parent
PEERS = ("transformers", "vllm", "openvino", "llamacpp", "lab")
CONVERTED = ("openvino", "llamacpp")  # peers with a format of their own
RESULTS, README = HERE / "results.json", HERE / "README.md"
REFERENCE = "transformers"  # whose tokens the others' are compared with


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), metavar="NAME", help=f"some of {', '.join(PEERS)}")
    parser.add_argument(
        "--workloads", nargs="+", default=list(WORKLOADS), metavar="NAME", help=f"some of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--repeats", type=int, default=5, help="samples of each workload (5); of slow ones 3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2", help="as lab's model.path; a Llama in bfloat16")
    parser.add_argument("--kv-gib", type=int, default=1, help="the KV cache that each peer is given (1 GiB)")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="a peer's interpreter")
    parser.add_argument("--lab-overrides", nargs="+", default=[], metavar="OVERRIDE", help="settings for lab")
    parser.add_argument("--resume", action="store_true", help="keep the samples of the last run and measure what it lacks")
    parser.add_argument("--no-cold", action="store_true", help="leave out the starts with cold caches")
    parser.add_argument("--quiet-share", type=float, default=0.04, help="most of the CPU in use before a sample (0.04)")
    parser.add_argument("--quiet-timeout", type=float, default=60.0, help="seconds to wait for that (60)")
    parser.add_argument("--retries", type=int, default=1, help="more tries at a sample that others disturbed (1)")
    parser.add_argument("--output", type=Path, help="where to write the results, instead of results.json and README.md")
    parser.add_argument("--tables", action="store_true", help="measure nothing: print results.json and put it into README.md")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.tables:
        text = render(json.loads(RESULTS.read_text(encoding="utf-8")))
        write_readme(README, text)
        print(text)
        return
    begin = time.monotonic()
    for name in args.peers:
        if name not in PEERS:
            raise unknown("peer", name, PEERS)
    for name in args.workloads:
        if name not in WORKLOADS:
            raise unknown("workload", name, WORKLOADS)
    work = cache_dir("peers")
    pythons, skipped = find_pythons(args, work)
    session, facts = make_session(args, pythons, work)
    if args.resume and session.state_path.is_file() and (differing := session.load()):
        raise UserError(f"--resume: the last run had another {', '.join(differing)}; run without --resume.")
    session.run()
    results = collect(session, facts, skipped)
    text = render(results)
    print(f"\n{text}\n\n{(time.monotonic() - begin) / 60:.1f} minutes.")
    is_whole = set(args.peers) == set(PEERS) and set(args.workloads) == set(WORKLOADS) and not args.no_cold
    if args.output is not None or is_whole:
        (args.output or RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        if args.output is None:
            write_readme(README, text)


def find_pythons(args: argparse.Namespace, work: Path) -> tuple[dict[str, str], list[str]]:
    """The interpreters of the peers that are installed, in the order of PEERS, and the names of the others."""
    told: dict[str, str] = {"lab": sys.executable}
    for pair in args.python:
        name, _, path = pair.partition("=")
        if name not in PEERS:
            raise unknown("peer", name, PEERS)
        told[name] = path
    pythons, skipped = {}, []
    for name in (name for name in PEERS if name in args.peers):
        python = Path(told.get(name, work / "venvs" / name / "bin" / "python")).expanduser()
        if python.is_file():
            pythons[name] = str(python)
        elif name in told:
            raise UserError(f"--python: {name} has no interpreter at {python}.")
        else:
            print(f"{name} is not installed ({python} is missing): skipped")
            skipped.append(name)
    return pythons, skipped


def make_session(args: argparse.Namespace, pythons: dict[str, str], work: Path) -> tuple[Session, DeviceFacts]:
    """A session that is ready to run: the model is there, converted where a peer needs it, and the device measured."""
    model = resolve_model(args.model)
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise UserError(f"--model: {args.model} has no tokenizer, which the prompts are made with.")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    torch.set_num_threads(args.threads)
    prepared = {name: work / "models" / f"{model.name}-{name}" for name in pythons if name in CONVERTED}
    plan = Plan(
        pythons=pythons,
        prepared=prepared,
        model=model,
        model_name=args.model,
        work=work,
        workloads=tuple(name for name in WORKLOADS if name in args.workloads),
        repeats=args.repeats,
        threads=args.threads,
        kv_bytes=args.kv_gib << 30,
        cold_starts=not args.no_cold,
        quiet_share=args.quiet_share,
        quiet_timeout_s=args.quiet_timeout,
        retries=args.retries,
        lab_overrides=tuple(args.lab_overrides),
    )
    session = Session(plan, encode)
    for name, folder in prepared.items():
        try:
            build_once(folder, lambda target, name=name: session.prepare(name, target), f"the checkpoint of {name}")
        except PeerFailed as failure:
            raise UserError("\n".join([f"converting the checkpoint: {failure}", *failure.details])) from None
    wait_until_quiet(args.quiet_share, args.quiet_timeout, print)
    facts = measure_device("cpu", again=True, log=print)
    return session, facts


def collect(session: Session, facts: DeviceFacts, skipped: list[str]) -> dict[str, Any]:
    """results.json: what was measured and on what, without token ids and without paths."""
    plan = session.plan
    reference = REFERENCE if REFERENCE in session.records else None
    peers = {}
    for name, record in session.records.items():
        samples = {w: [{k: v for k, v in s.items() if k != "token_ids"} for s in of_w] for w, of_w in record.samples.items()}
        peers[name] = {
            "versions": record.versions,
            "settings": record.settings,
            "failure": record.failure,
            "starts": record.starts,
            "samples": samples,
            "agreement": {
                w: share for w in plan.workloads if (share := agreement_with(session, reference, name, w)) is not None
            },
        }
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "model": plan.model_name,
        "threads": plan.threads,
        "kv_bytes": plan.kv_bytes,
        "workloads": {name: WORKLOADS[name].title for name in plan.workloads},
        "machine": {
            "name": facts.name,
            "cores": os.cpu_count(),
            "bandwidth_gb_s": facts.bandwidth / 1e9,
            "bf16_gflop_s": facts.flops["bfloat16"] / 1e9,
        },
        "git": git_state(HERE.parent.parent),
        "floors": floors_of(plan, session.encode, facts),
        "reference": reference,
        "skipped": skipped,
        "peers": peers,
    }


def agreement_with(session: Session, reference: str | None, name: str, workload: str) -> float | None:
    """Over the samples that both took with the same prompts; None when there are none."""
    if reference is None:
        return None
    theirs = {s["prompts"]: s["token_ids"] for s in session.records[reference].samples.get(workload, [])}
    pairs = [
        (s["token_ids"], theirs[s["prompts"]])
        for s in session.records[name].samples.get(workload, [])
        if s["prompts"] in theirs
    ]
    return (
        agreement([ids for ours, _ in pairs for ids in ours], [ids for _, other in pairs for ids in other]) if pairs else None
    )


def floors_of(plan: Plan, encode: Encode, facts: DeviceFacts) -> dict[str, float]:
    """The floors of the figures of tables.FIGURES that have one."""
    of = WorkloadFloors(read_config(plan.model), facts)
    w1, w2, w3, w4 = (requests_of(name, 0, encode) for name in WORKLOADS)
    step_s = of.decode_step_s(len(w1[0].prompt_ids), w1[0].num_output)
    return {
        "decode_tok_s": 1 / step_s,
        "itl_ms": step_s * 1e3,
        "ttft_ms": of.first_token_s(len(w1[0].prompt_ids)) * 1e3,
        "w2_tok_s": sum(request.num_output for request in w2) / of.all_at_once_s(w2),
        "w3_tok_s": num_prompt_tokens(w3) / of.first_token_s(num_prompt_tokens(w3)),
        "w4_s": of.all_at_once_s(w4, SHARED_PREFIX),
        "peak_mb": of.weights_bytes / 1e6,
    }


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"peers: {error}")
