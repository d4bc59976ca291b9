"""A profiled run: an ordinary run, with trace.json and a table that adds up."""

import json
from itertools import product

import pytest

from lab.bench import job as job_module
from lab.bench import profiling
from lab.runner.batch import BatchBuilder
from lab.settings import CompileSettings, PluginChoice, SchedulerSettings, Settings
from tests.bench.conftest import Clock
from tests.rigs import ALPHABET, COUNT_VOCAB

PROMPTS = [{"prompt": ALPHABET + "AB"}, {"prompt": "XYZab", "sampling": {"max_tokens": 20}}]  # the first one's drafts come true
SAMPLING = {"temperature": 0.0, "max_tokens": 30}
LAYERS = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
NUM_LAYERS = 2  # of the tiny model


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compiled"))


def slices_of(folder):
    """The slices of trace.json by the name of their track, and the other events."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    return {names[tid]: [s for s in slices if s["tid"] == tid] for tid in names}, events


def overlapping(slices):
    """Slices that neither lie in the one before nor follow it; times are whole nanoseconds."""
    found, open_ends = [], []
    for slice_ in sorted(slices, key=lambda s: (s["ts"], -s["dur"])):
        begin, end = round(slice_["ts"] * 1e3), round((slice_["ts"] + slice_["dur"]) * 1e3)
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            found.append(slice_)
        open_ends.append(end)
    return found


@pytest.mark.parametrize(
    ("mode", "is_async", "spec"), [*product(("none", "piecewise"), (True, False), ("none",)), ("piecewise", True, "ngram")]
)
def test_a_profiled_run_is_the_same_run_with_a_table_that_adds_up(run, compiled, capsys, mode, is_async, spec):
    given = {
        "compile": CompileSettings(mode=mode, cache_dir=compiled),
        "scheduler": SchedulerSettings(async_scheduling=is_async),
        "spec": PluginChoice(spec),
        "draft_length": PluginChoice("fixed"),  # the other lengths go by the clock
        "sampling": SAMPLING,
    }
    plain = run(PROMPTS, **given)
    capsys.readouterr()
    outcome = run(PROMPTS, profile=True, **given)
    shown = capsys.readouterr().out

    def tokens(which):
        return {line["id"]: line["output_token_ids"] for line in which.lines("requests")}

    assert outcome.code == 0 and tokens(outcome) == tokens(plain)
    assert "profile" not in plain.metrics and not (plain.folder / "trace.json").exists()

    profile, steps = outcome.metrics["profile"], {line["step"]: line for line in outcome.lines("steps")}
    parts = {part["name"]: part for part in profile["parts"]}
    assert set(parts) >= LAYERS | {"batch", "plan", "elementwise", "attention write", "attention attend", "lm_head", "sample"}
    assert all(parts[name]["ms"] > 0 and parts[name]["bytes"] > 0 for name in LAYERS)
    assert all(part["ms"] >= 0 for part in parts.values())
    assert sum(part["ms"] for part in parts.values()) == pytest.approx(profile["total"]["ms"])
    assert profile["total"]["ms"] >= profile["runner_ms"]
    within = sum(part["ms"] for name, part in parts.items() if name not in ("scheduler", "output", "other"))
    assert within <= profile["runner_ms"] * 1.001
    decode = [steps[number] for number in profile["steps"]]
    assert len(decode) > 5 if spec == "none" else len(decode) > 1
    if spec == "none":  # with drafts in flight, the tokens of a step's record are those planned at most
        assert all(line["num_tokens"] == line["num_requests"] for line in decode)
    else:
        assert any(line["num_drafts"] for line in decode) and "propose" in parts
    assert profile["modes"] == {decode[0]["mode"]: len(decode)} and decode[0]["mode"] == mode
    assert profile["runner_ms"] >= sum(line["ms"] for line in decode) / len(decode)  # a slice encloses the runner's own watch
    assert ("scheduler" in parts) or is_async
    assert "| decode step " in shown and "| qkv_proj " in shown
    assert "| prefill step " in shown and outcome.metrics["profile_prefill"]["modes"] == {mode: 1}


def test_steps_of_prompts_alone_have_a_table_of_their_own(run, monkeypatch):
    scheduler = SchedulerSettings(max_num_batched_tokens=8)
    given = {"profile": True, "scheduler": scheduler, "sampling": SAMPLING}
    prompt = {"prompt": ALPHABET[:52]}
    outcome = run([prompt], **given)
    profile, steps = outcome.metrics["profile_prefill"], outcome.lines("steps")
    assert [line["num_tokens"] for line in steps[:8]] == [8] * 6 + [4, 1]
    assert profile["steps"] == [steps[i]["step"] for i in range(1, 6)]  # neither the first nor a smaller one
    assert (profile["num_tokens"], profile["num_requests"], profile["context"]) == (8, 1, 32)
    parts = {part["name"]: part for part in profile["parts"]}
    assert set(parts) >= LAYERS | {"batch", "plan", "elementwise", "attention write", "attention attend"}
    assert all(parts[name]["ms"] > 0 for name in LAYERS)
    assert sum(part["ms"] for part in parts.values()) == pytest.approx(profile["total"]["ms"])
    assert profile["total"]["name"] == "prefill step" and outcome.metrics["profile"]["total"]["name"] == "decode step"
    decode = {part["name"]: part["flops"] for part in outcome.metrics["profile"]["parts"] if part["name"] in LAYERS}
    assert all(parts[name]["flops"] == 8 * decode[name] for name in LAYERS)
    monkeypatch.setattr(profiling, "RECORDED_PREFILLS", 3)
    fewer = run([prompt], **given).metrics
    assert len(fewer["profile_prefill"]["steps"]) == 2 and fewer["profile_prefill"]["unrecorded_runner_ms"] > 0
    assert len(fewer["profile"]["steps"]) == len(outcome.metrics["profile"]["steps"])


@pytest.mark.parametrize(("mode", "is_async"), [*product(("none", "piecewise"), (True, False))])
def test_the_timeline_nests_and_names_every_step(run, compiled, mode, is_async):
    scheduler = SchedulerSettings(async_scheduling=is_async)
    compile_ = CompileSettings(mode=mode, cache_dir=compiled)
    outcome = run(PROMPTS, profile=True, compile=compile_, scheduler=scheduler, sampling=SAMPLING)
    tracks, events = slices_of(outcome.folder)
    assert set(tracks) == {"engine", "runner"}
    for slices in tracks.values():
        assert all(s["ts"] >= 0 and s["dur"] >= 0 for s in slices) and overlapping(slices) == []
    steps = {line["step"]: line for line in outcome.lines("steps")}
    of_steps = [s for s in tracks["runner"] if s["name"].endswith(" step")]
    assert {s["args"]["step"] for s in of_steps} == set(steps) and len(of_steps) == len(steps)
    for slice_ in of_steps:
        line, args = steps[slice_["args"]["step"]], slice_["args"]
        assert (args["num_tokens"], args["num_requests"], args["mode"]) == tuple(
            line[name] for name in ("num_tokens", "num_requests", "mode")
        )
    assert of_steps[0]["name"] == "prefill step" and of_steps[-1]["name"] == "decode step"
    names = {s["name"] for s in tracks["runner"]}
    assert names >= {"batch", "forward", "plan", "model", "attention write", "attention attend", "lm_head", "propose"}
    assert names & {"sample", "take greedy"}
    assert names >= LAYERS and ("piece 1" in names) == (mode == "piecewise")
    assert sum(s["name"] == "attention attend" for s in tracks["runner"]) == NUM_LAYERS * len(steps)
    assert {s["name"] for s in tracks["engine"]} >= {"engine step", "schedule", "collect", "update", "output", "record"}
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"running", "waiting", "kv blocks"}
    assert len(counters) == 3 * len(steps)
    assert [e["args"]["kv blocks"] for e in counters if e["name"] == "kv blocks"] == [
        line["kv_used_blocks"] for line in outcome.lines("steps")
    ]


def test_waiting_for_requests_is_on_the_timeline_and_in_no_step(run):
    clock = Clock()
    prompts = [{"prompt": "ABC"}, {"prompt": "ABC", "arrival_s": 3.0}]
    outcome = run(prompts, profile=True, clock=clock, sampling=SAMPLING)
    tracks, _ = slices_of(outcome.folder)
    assert [s["name"] for s in tracks["engine"]].count("idle") == len(clock.slept) > 10


def test_the_recording_ends_though_the_run_goes_on_and_though_it_does_not(run, monkeypatch):
    monkeypatch.setattr(profiling, "RECORDED_STEPS", 4)
    found = run(PROMPTS, profile=True, sampling=SAMPLING).metrics["profile"]
    assert 0 < len(found["steps"]) <= 4 and found["unrecorded_runner_ms"] > 0
    monkeypatch.setattr(profiling, "LONGEST_RECORDING", 2)
    found = run(PROMPTS, profile=True, sampling=SAMPLING).metrics["profile"]
    assert 0 < len(found["steps"]) <= 2


def test_a_run_without_decode_steps_has_a_timeline_and_no_table(run):
    outcome = run([{"prompt": "ABC"}], profile=True, sampling={"max_tokens": 1})
    assert outcome.code == 0 and outcome.metrics["profile"] is None and outcome.metrics["profile_prefill"] is None
    assert "there is no table" in (outcome.folder / "log.txt").read_text()
    tracks, _ = slices_of(outcome.folder)
    assert [s["name"] for s in tracks["runner"] if s["name"].endswith("step")] == ["prefill step"]


def test_without_profile_nothing_is_watched(run, monkeypatch):
    seen = []
    prepare = job_module._prepare
    monkeypatch.setattr(job_module, "_prepare", lambda *args: seen.append(prepare(*args)) or seen[0])
    assert run([{"prompt": "ABC"}]).code == 0
    (job,) = seen
    engine = job.stack.engine
    assert job.profile is None and Settings().profile is False
    for owner, methods in ((engine, ("step",)), (engine.scheduler, ("schedule", "update")), (engine.model, ("logits",))):
        assert not vars(owner).keys() & set(methods)
    assert not vars(engine._executor._runner).keys() & {"execute"}


def test_a_step_that_fails_leaves_the_timeline(run, monkeypatch):
    original, calls = BatchBuilder.build, []

    def fail(self, *args):
        calls.append(args)
        if len(calls) == 8:  # operators are being recorded
            raise ZeroDivisionError("planted")
        return original(self, *args)

    monkeypatch.setattr(BatchBuilder, "build", fail)
    prompts = [{"prompt": "ABC"}, {"prompt": "ABC", "arrival_s": 0.5}]
    outcome = run(prompts, profile=True, sampling=SAMPLING, clock=Clock())
    assert outcome.code == 1 and outcome.metrics["num_failed"] == 1
    tracks, _ = slices_of(outcome.folder)
    assert overlapping(tracks["runner"]) == []
    found = outcome.metrics["profile"]
    assert len(found["steps"]) > 20 and {part["name"] for part in found["parts"]} >= LAYERS


def test_sampling_by_chance_reads_the_logits(run):
    found = run(PROMPTS, profile=True, sampling={"temperature": 0.7, "max_tokens": 20}).metrics["profile"]
    (sample,) = (part for part in found["parts"] if part["name"] == "sample")
    assert sample["bytes"] == pytest.approx(found["num_tokens"] * 4 * COUNT_VOCAB)  # float32
