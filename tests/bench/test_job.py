"""The main job: what stands in the run folder, whatever becomes of the run."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from lab import registry
from lab.bench import job
from lab.bench.sender import LONGEST_SLEEP_S
from lab.contracts.sink import Sink
from lab.contracts.workload import WorkItem, Workload
from lab.errors import UserError
from lab.interrupt import AFTER_STEP, WRITING
from lab.metrics import roofline
from lab.metrics.quiet import CpuWatch
from lab.settings import CacheSettings, ModelSettings, PluginChoice, SchedulerSettings, TrackingSettings, WandbSettings
from tests.bench.conftest import FACTS

METRICS = {
    "num_requests num_failed prompt_tokens output_tokens duration_s output_tok_per_s total_tok_per_s requests_per_s",
    "ttft_ms itl_ms tpot_ms e2e_ms queue_ms prefill_ms decode_ms preemptions prefix_cache kv compile memory roofline startup_s",
}
REQUEST = (
    "id prompt_tokens cached_tokens output_token_ids text finish_reason stop_reason arrival_s ttft_ms itl_ms e2e_ms "
    "num_preemptions accepted_per_step error"
)
STEP = "step t_s ms num_tokens num_requests num_drafts num_accepted padded_to mode kv_used_blocks waiting running preempted"


def test_a_run_leaves_its_whole_record(run, capsys):
    outcome = run([{"prompt": "ABC"}, {"prompt": "XYZa", "sampling": {"max_tokens": 3}, "reference": "bcd"}])
    assert outcome.code == 0
    metrics = outcome.metrics
    assert {name for names in METRICS for name in names.split()} <= set(metrics)
    assert (metrics["num_requests"], metrics["num_failed"]) == (2, 0)
    assert (metrics["prompt_tokens"], metrics["output_tokens"]) == (7, 11)
    first, second = sorted(outcome.lines("requests"), key=lambda line: line["id"])
    assert set(REQUEST.split()) <= set(first)
    assert (first["text"], first["output_token_ids"], first["finish_reason"]) == ("DEFGHIJK", list(range(3, 11)), "length")
    assert (second["text"], second["reference"]) == ("bcd", "bcd")
    assert first["tokens_per_step"] == [1] * 8 and len(first["itl_ms"]) == 7
    steps = outcome.lines("steps")
    assert set(STEP.split()) <= set(steps[0])
    assert sum(step["num_tokens"] for step in steps) >= 7 + 7 + 2
    assert metrics["num_steps"] == len(steps) == metrics["compile"]["dispatch"]["none"]
    resolved = json.loads((outcome.folder / "resolved.json").read_text())
    assert {"attention", "spec", "quant", "moe", "policy", "workload"} <= set(resolved)
    assert json.loads((outcome.folder / "env.json").read_text())["threads"] == 1
    log = (outcome.folder / "log.txt").read_text()
    assert "plugins: attention=" in log and "spec=none" in log and "running 2 requests" in log
    shown = capsys.readouterr().out
    assert "DEFGHIJK" in shown and "TTFT" in shown and str(outcome.folder) in shown


def test_waiting_in_the_queue_counts_in_ttft(run, clock):
    clock.tick = 0.05
    prompts = [{"prompt": "ABC", "sampling": {"max_tokens": 15}}] * 2
    first, second = run(prompts, clock=clock, scheduler=SchedulerSettings(max_num_seqs=1)).lines("requests")
    assert second["queue_ms"] >= 1000.0
    assert second["ttft_ms"] >= second["queue_ms"] >= first["e2e_ms"] - 1e3
    for line in (first, second):
        assert len(line["output_token_ids"]) == sum(line["tokens_per_step"]) == 15
        assert line["queue_ms"] + line["prefill_ms"] + line["decode_ms"] == pytest.approx(line["e2e_ms"], abs=1.0)
    assert first["arrival_s"] == second["arrival_s"] == 0.0


@pytest.mark.parametrize(("max_num_seqs", "num_steps"), [(2, 1), (1, 2)])
def test_steps_that_bring_first_tokens_are_counted(run, max_num_seqs, num_steps):
    metrics = run([{"prompt": "ABC"}, {"prompt": "XYZa"}], scheduler=SchedulerSettings(max_num_seqs=max_num_seqs)).metrics
    assert metrics["num_first_token_steps"] == num_steps


def test_tokens_are_counted_as_the_model_gave_them(run, model, tmp_path):
    """The text has fewer, once it is tokenised again: one token of this vocabulary is what two others spell."""
    folder = shutil.copytree(model, tmp_path / "merging")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = {character: i for character, i in tokenizer["model"]["vocab"].items() if character != "/"} | {"EF": 63}
    tokenizer["model"] = {"type": "BPE", "vocab": vocabulary, "merges": [["E", "F"]]}
    tokenizer["pre_tokenizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    outcome = run([{"prompt": "ABC", "sampling": {"max_tokens": 15}}], model=ModelSettings(path=str(folder)))
    (line,) = outcome.lines("requests")
    assert line["output_token_ids"] == list(range(3, 18))
    assert len(AutoTokenizer.from_pretrained(folder)(line["text"]).input_ids) == 14
    assert outcome.metrics["output_tokens"] == sum(line["tokens_per_step"]) == 15
    assert outcome.metrics["tpot_ms"]["mean"] == pytest.approx(sum(line["itl_ms"]) / 14, rel=1e-3)


def test_requests_are_sent_at_their_times_whatever_the_engine_does(run, clock):
    prompts = [{"prompt": "ABC", "arrival_s": at, "sampling": {"max_tokens": 40}} for at in (0.0, 0.05, 7.5)]
    outcome = run(prompts, clock=clock)
    early, held_up, late = sorted(outcome.lines("requests"), key=lambda line: line["id"])
    assert [early["arrival_s"], held_up["arrival_s"], late["arrival_s"]] == pytest.approx([0.0, 0.05, 7.5])
    assert held_up["ttft_ms"] < early["e2e_ms"]  # sent while the first one ran, and served beside it
    assert late["ttft_ms"] < 100.0  # nothing was in its way
    assert held_up["e2e_ms"] < 2000.0  # nobody slept while there was work
    assert 5.0 < sum(clock.slept) <= 7.5 and max(clock.slept) <= LONGEST_SLEEP_S
    assert outcome.metrics["duration_s"] >= 7.5


@pytest.mark.parametrize(("share", "least_s", "recorded"), [(0.31, 0.0, 0.31), (None, 0.0, None), (0.31, 3600.0, None)])
def test_what_others_take_of_the_cpu_is_recorded(run, monkeypatch, capsys, share, least_s, recorded):
    """Where the system tells, and the run is long enough for its clock to tell."""
    monkeypatch.setattr(CpuWatch, "busy_share", lambda self: share)
    monkeypatch.setattr("lab.bench.recorder.SHORTEST_WATCH_S", least_s)
    assert run([{"prompt": "ABC"}]).metrics.get("others_cpu_share") == recorded
    assert ("busy: other processes took 31% of the CPU" in capsys.readouterr().out) == (recorded is not None)


def test_a_request_that_cannot_be_served_is_recorded_and_the_run_goes_on(run):
    prompts = [{"prompt": "ABC"}, {"prompt_token_ids": [5] * 5000}, {"prompt_token_ids": [999]}, {"prompt": "DEF"}]
    outcome = run(prompts)
    assert outcome.code == 0
    assert (outcome.metrics["num_requests"], outcome.metrics["num_failed"]) == (4, 2)
    by_id = {line["id"]: line for line in outcome.lines("requests")}
    assert "5000 tokens" in by_id["1"]["error"] and "999" in by_id["2"]["error"]
    assert by_id["1"]["output_token_ids"] == [] and by_id["1"]["ttft_ms"] is None
    assert by_id["0"]["error"] is None and by_id["3"]["text"] == "GHIJKLMN"


def test_a_request_that_is_no_text_is_refused_and_the_run_goes_on(run):
    half = "\ud800 lone"
    prompts = [{"prompt": half}, {"prompt": "ABC", "sampling": {"stop": [half]}}, {"prompt": "ABC"}]
    outcome = run(prompts)
    assert (outcome.code, outcome.metrics["num_failed"]) == (0, 2)
    by_id = {line["id"]: line for line in outcome.lines("requests")}
    assert "the prompt is not text" in by_id["0"]["error"] and "stop[0] is not text" in by_id["1"]["error"]
    assert by_id["2"]["text"] == "DEFGHIJK"


def test_a_request_that_never_fits_the_cache_is_refused_by_the_engine(run):
    outcome = run([{"prompt": "A" * 40, "sampling": {"max_tokens": 100}}, {"prompt": "ABC"}], cache=CacheSettings(num_blocks=4))
    assert outcome.metrics["num_failed"] == 1
    failed = next(line for line in outcome.lines("requests") if line["error"])
    assert (failed["id"], failed["prompt_tokens"]) == ("0", 40)
    assert "request 0" not in failed["error"] and failed["error"][0].islower()
    assert f"request 0 was refused: {failed['error']}\n" in (outcome.folder / "log.txt").read_text()


def test_many_refusals_are_told_in_few_lines(run):
    outcome = run([{"prompt_token_ids": [999]}] * 7 + [{"prompt": "ABC"}])
    text = (outcome.folder / "log.txt").read_text()
    assert text.count("was refused") == 3 and "further requests refused: 4, see requests.jsonl" in text
    assert sum(line["error"] is not None for line in outcome.lines("requests")) == 7
    few = run([{"prompt_token_ids": [999]}] * 3 + [{"prompt": "ABC"}])
    assert "further requests refused" not in (few.folder / "log.txt").read_text()


def test_a_run_of_refusals_is_the_users_mistake(run, tmp_path):
    with pytest.raises(UserError, match="every request was refused; the first one: .*999"):
        run([{"prompt_token_ids": [999]}, {"prompt_token_ids": [-1]}])
    metrics = json.loads((tmp_path / "run0" / "metrics.json").read_text())
    assert (metrics["num_requests"], metrics["num_failed"]) == (2, 2)


def test_bad_sampling_of_a_line_ends_the_run_before_it_starts(run, tmp_path):
    with pytest.raises(UserError, match="request 0: .*min_tokens"):
        run([{"prompt": "ABC", "sampling": {"min_tokens": 9}}])
    assert not (tmp_path / "run0" / "requests.jsonl").exists()
    assert "min_tokens" in (tmp_path / "run0" / "log.txt").read_text()


def test_samples_of_one_request_have_a_line_each(run):
    outcome = run([{"prompt": "ABC", "sampling": {"n": 3, "temperature": 1.0, "logprobs": 1}}])
    lines = outcome.lines("requests")
    assert [(line["id"], line["index"]) for line in lines] == [("0", 0), ("0", 1), ("0", 2)]
    assert outcome.metrics["num_requests"] == 1 and outcome.metrics["prompt_tokens"] == 3
    assert outcome.metrics["output_tokens"] == 24
    entry = lines[0]["logprobs"][0]
    assert len(lines[0]["logprobs"]) == 8 and entry["token_id"] == lines[0]["output_token_ids"][0]
    assert entry["top"][str(entry["token_id"])] == entry["logprob"] < 0.0


def test_drafts_and_prefix_hits_are_counted(run, clock):
    repeated = {"prompt": "ABCDEFGHABCDEFGHABCDEFGHABCDEFGHAB", "sampling": {"max_tokens": 12}, "category": "copies"}
    fixed = PluginChoice("fixed")
    outcome = run([repeated, {**repeated, "arrival_s": 60.0}], clock=clock, spec=PluginChoice("ngram"), draft_length=fixed)
    spec, cache = outcome.metrics["spec"], outcome.metrics["prefix_cache"]
    assert spec["num_drafts"] > 0 and spec["accepted_tokens"] > 0
    assert spec["acceptance_per_position"][0] > 0.5
    lines = outcome.lines("requests")
    assert sum(sum(line["accepted_per_step"]) for line in lines) == spec["accepted_tokens"]
    assert sum(sum(line["drafts_per_step"]) for line in lines) >= spec["draft_tokens"]
    assert [line["category"] for line in lines] == ["copies"] * 2
    assert outcome.metrics["categories"]["copies"]["draft_tokens"] == spec["draft_tokens"]
    assert spec["draft_ms_share"] > 0 and spec["verify_ms_share"] > 0
    assert spec["draft_ms_share"] + spec["verify_ms_share"] <= 1
    steps = outcome.lines("steps")
    assert sum(line["num_drafts"] for line in steps) >= spec["draft_tokens"]
    assert all(line["num_tokens"] <= line["num_requests"] + line["num_drafts"] + 34 for line in steps)
    assert all(line["num_drafting"] == 1 for line in steps if line["num_drafts"])
    assert max(max(line["tokens_per_step"]) for line in lines) > 1
    assert cache == {"queries": 68, "hits": 32, "hit_rate": 32 / 68}
    assert lines[1]["cached_tokens"] == 32


def test_sinks_named_in_the_settings_get_the_records(run, monkeypatch):
    registry.discover()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))  # what is registered here ends with the test
    told = []

    class Telling(Sink):
        """Notes what it is told."""

        def start(self, run):
            told.append(("start", set(run.resolved)))

        def step(self, record):
            told.append(("step", record["step"]))

        def request(self, record):
            told.append(("request", record["text"]))

        def finish(self, metrics, exit_code):
            told.append(("finish", exit_code))

    registry.register("sink", "telling")(Telling)
    tracking = TrackingSettings(wandb=WandbSettings(mode="disabled"), sinks=("telling",))
    run([{"prompt": "ABC"}], tracking=tracking)
    assert told[0][0] == "start" and "workload" in told[0][1]
    assert told.count(("request", "DEFGHIJK")) == 1 and ("step", 0) in told and told[-1] == ("finish", 0)
    monkeypatch.setattr("lab.bench.job.build_stack", lambda *_, **__: pytest.fail("the model was loaded first"))
    with pytest.raises(UserError, match="Did you mean 'telling'"):
        run([{"prompt": "ABC"}], tracking=replace(tracking, sinks=("teling",)))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ([], "made no requests"),
        (None, "must make a list of requests, got NoneType"),
        (["ABC"], "request 0 must be a WorkItem, got str"),
        ([-1.0], "arrival_s of request 0 must be a time from 0 on, got -1.0"),
        ([0.0, float("nan")], "arrival_s of request 1 must be a time from 0 on, got nan"),
        ([0.0, float("inf")], "arrival_s of request 1 must be a time from 0 on, got inf"),
        ([0.0, "1"], "arrival_s of request 1 must be a time from 0 on, got '1'"),
        ([0.0, 2.0, 1.0], "request 2 arrives at 1 s, before request 1"),
    ],
)
def test_a_workload_plugin_is_held_to_its_contract(run, monkeypatch, made, says):
    registry.discover()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    class Sloppy(Workload):
        """Makes what the test says."""

        def items(self, model):
            if made is None or made == ["ABC"]:
                return made
            return [WorkItem(prompt="ABC", arrival_s=at) for at in made]

    registry.register("workload", "sloppy")(Sloppy)
    with pytest.raises(UserError) as refusal:
        run([], workload=PluginChoice("sloppy"))
    assert str(refusal.value).startswith("workload 'sloppy'") and says in str(refusal.value)


def test_goodput_of_a_run(run, clock):
    prompts = [{"prompt": "ABC"}] * 2
    scheduler = SchedulerSettings(max_num_seqs=1)
    outcome = run(prompts, clock=clock, scheduler=scheduler, goodput={"ttft": 20.0})
    ttft = sorted(line["ttft_ms"] for line in outcome.lines("requests"))
    assert ttft[0] <= 20.0 < ttft[1]
    assert outcome.metrics["goodput_req_per_s"] == pytest.approx(1 / outcome.metrics["duration_s"])


def test_json_is_the_last_line_and_all_there_is_on_stdout(child, tmp_path):
    running = child("+workload=random", "workload.num_requests=3", "workload.output.mean=4", flags=["--json"])
    code, out, err = running.end()
    assert code == 0, err
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["folder"] == str(tmp_path / "child")
    assert found["num_requests"] == 3 and found["output_tokens"] == 12
    assert "TTFT" in err


LONG = ("+workload=random", "workload.num_requests=4000", "workload.output.mean=60", "workload.input.mean=20")


def test_a_killed_run_keeps_what_was_finished(child):
    running = child(*LONG)
    running.wait_for_requests(5)
    running.signal(signal.SIGKILL)
    assert running.end()[0] == -signal.SIGKILL
    lines = (running.folder / "requests.jsonl").read_text().split("\n")
    finished = [json.loads(line) for line in lines[:-1]]
    assert len(finished) >= 5 and all(len(line["output_token_ids"]) == 60 for line in finished)
    assert lines[-1] == ""  # no half line
    assert not (running.folder / "metrics.json").exists()
    steps = (running.folder / "steps.jsonl").read_text().splitlines()
    assert json.loads(steps[-1])["num_requests"] > 0


def test_ctrl_c_ends_a_run_cleanly(child):
    running = child(*LONG)
    running.wait_for_requests(5)
    running.signal(signal.SIGINT)
    code, out, err = running.end()
    assert code == 130, err
    assert "Traceback" not in err
    metrics = json.loads((running.folder / "metrics.json").read_text())
    lines = [json.loads(line) for line in (running.folder / "requests.jsonl").read_text().splitlines()]
    ended = sum(line["finish_reason"] == "length" for line in lines)
    assert metrics["interrupted"] is True
    assert metrics["num_requests"] == ended >= 5 and metrics["num_unfinished"] == 4000 - ended
    assert {line["finish_reason"] for line in lines} == {"length", "abort"}
    assert metrics["output_tokens"] == sum(len(line["output_token_ids"]) for line in lines)
    assert "TTFT" in out and f"{4000 - ended} unfinished" in out
    assert err.splitlines().count(AFTER_STEP) == 1


SLOW = """
import sys, threading, time
from lab.__main__ import main
from lab.runner.runner import Runner

execute = Runner.execute

def stuck(self, step):
    result = execute(self, step)
    if step.index >= 12:
        print("stuck", file=sys.stderr, flush=True)
        time.sleep(3600)
    return result

Runner.execute = stuck
sys.exit(main())
"""


def test_ctrl_c_is_answered_during_a_step_and_the_second_one_does_not_wait_for_it(child):
    running = child(*LONG, code=SLOW)
    running.wait_to_read("stuck")
    running.signal(signal.SIGINT)
    running.wait_to_read(AFTER_STEP)  # though the step goes on
    assert running.process.poll() is None
    running.signal(signal.SIGINT)
    out, err = running.process.stdout.read(), running.process.stderr.read()
    assert running.process.wait() == 130 and "Traceback" not in err
    assert json.loads((running.folder / "metrics.json").read_text())["interrupted"] is True
    assert "unfinished" in out and f"run folder: {running.folder}" in out


def test_ctrl_c_while_results_are_written_loses_none(run, monkeypatch, capsys):
    write = job.write_json

    def pressed(path, data):
        if path.name == "metrics.json":
            signal.raise_signal(signal.SIGINT)
        write(path, data)

    monkeypatch.setattr(job, "write_json", pressed)
    outcome = run([{"prompt": "ABC"}])
    assert outcome.code == 0 and outcome.metrics["num_requests"] == 1
    assert capsys.readouterr().err.splitlines()[-1] == WRITING


def test_what_an_interrupted_request_had_is_kept(run, monkeypatch):
    executed = []

    def interrupt_later(self, line):
        executed.append(line)
        if len(executed) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("lab.bench.recorder.StepTotals.add", interrupt_later)
    prompts = [{"prompt": "ABC", "sampling": {"max_tokens": 40}}] * 2 + [{"prompt": "DEF", "arrival_s": 100}]
    outcome = run(prompts, scheduler=SchedulerSettings(max_num_seqs=1))
    assert outcome.code == 130
    begun, waiting = outcome.lines("requests")  # the third was never sent
    had = len(begun["output_token_ids"])
    assert 4 <= had <= 6 and begun["text"] == "DEFGHIJ"[:had]
    assert (begun["finish_reason"], waiting["finish_reason"], waiting["output_token_ids"]) == ("abort", "abort", [])
    metrics = outcome.metrics
    assert (metrics["num_requests"], metrics["num_unfinished"], metrics["num_failed"]) == (0, 3, 0)
    assert (metrics["prompt_tokens"], metrics["output_tokens"]) == (3, had)
    assert metrics["duration_s"] > 0 and "ttft_ms" in metrics and "e2e_ms" not in metrics


def test_a_folder_that_takes_no_files_is_told_in_one_message(run):
    with pytest.raises(UserError, match=r"cannot write .*requests\.jsonl: Is a directory"):
        run([{"prompt": "ABC"}], prepare=lambda folder: (folder / "requests.jsonl").mkdir())
    with pytest.raises(UserError, match=r"cannot write .*log\.txt"):
        run([{"prompt": "ABC"}], prepare=lambda folder: (folder / "log.txt").mkdir())


def test_a_finished_run_shows_its_results_though_metrics_json_cannot_be_written(run, tmp_path, capsys):
    def prepare(folder):
        (folder / "metrics.json.part").symlink_to("/dev/full")

    with pytest.raises(UserError, match=r"cannot write .*metrics\.json: No space left"):
        run([{"prompt": "ABC"}], prepare=prepare)
    shown = capsys.readouterr().out
    assert "TTFT" in shown and "8 output" in shown
    left = {path.name for path in (tmp_path / "run0").iterdir()}
    assert "requests.jsonl" in left and not left & {"metrics.json", "metrics.json.part"}


def test_a_full_disk_ends_the_run_with_one_message(run, tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*steps\.jsonl: No space left"):
        run([{"prompt": "ABC"}], prepare=lambda folder: (folder / "steps.jsonl").symlink_to("/dev/full"))
    assert json.loads((tmp_path / "run0" / "metrics.json").read_text())["num_requests"] == 0
    assert "No space left" in (tmp_path / "run0" / "log.txt").read_text()


def test_a_fault_leaves_its_traceback_in_the_log(run, tmp_path, monkeypatch):
    def fail(self, generation, planned):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("lab.bench.recorder.Recorder.finished", fail)
    with pytest.raises(ZeroDivisionError):
        run([{"prompt": "ABC"}])
    text = (tmp_path / "run0" / "log.txt").read_text()
    assert "Traceback" in text and "ZeroDivisionError: planted" in text
    assert (tmp_path / "run0" / "metrics.json").exists()


def test_a_step_that_fails_makes_the_run_a_fault(run, tmp_path, monkeypatch):
    def fail(self, step):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("lab.runner.runner.Runner.execute", fail)
    outcome = run([{"prompt": "ABC"}, {"prompt": "DEF"}])
    assert outcome.code == 1
    assert [line["error"] for line in outcome.lines("requests")] == ["ZeroDivisionError: planted"] * 2
    assert outcome.metrics["num_failed"] == 2
    assert "planted" in (outcome.folder / "log.txt").read_text()


def test_the_floor_says_how_the_device_was_measured(run, capsys):
    busy = replace(FACTS, quiet=False, busy_share=0.4)
    roofline._remember(roofline._facts_path("cpu", 1), busy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "_measure_apart", lambda kind, threads: replace(busy, threads=threads))
        outcome = run([{"prompt": "ABC"}])
    found = outcome.metrics["roofline"]
    assert (found["quiet"], found["busy_share"], found["threads"]) == (False, 0.4, 1)
    assert found["measured"] == FACTS.measured
    assert "the floor is a guess" in capsys.readouterr().out
