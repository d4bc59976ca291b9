"""The harness that measures lab beside other engines: its protocol, its turns, its tables, on a tiny model with lab alone."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.metrics.roofline import DeviceFacts, floors
from lab.model.config import read_config
from tests import rigs
from tests.conftest import lend_native

PEERS = Path(__file__).resolve().parents[2] / "experiments" / "peers"
sys.path.append(str(PEERS))

from harness import machine, session, tables, workloads  # noqa: E402
from harness.floors import WorkloadFloors  # noqa: E402
from harness.process import PeerFailed, PeerProcess  # noqa: E402
from harness.protocol import Request, Start  # noqa: E402
from harness.session import Plan, Session  # noqa: E402

SHORT = Request([1, 2, 3], 5)
PATIENCE_S = 600  # with a machine that has other work as well


def encode(text):
    """A token for each word, fit for a vocabulary of 64."""
    return [sum(word.encode()) % 64 for word in text.split()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return rigs.count(tmp_path_factory.mktemp("count"), vocab_size=64)


@pytest.fixture
def work(tmp_path):
    """A folder for the harness, where lab's own caches have the C++ kernels already: each build takes half a minute."""
    folder = tmp_path / "work"
    lend_native(folder)
    lend_native(folder / "cache" / "lab")
    return folder


def plan(model, work, **changes):
    given = {
        "pythons": {"lab": sys.executable},
        "prepared": {},
        "model": model,
        "model_name": "count",
        "work": work,
        "workloads": ("w1", "w3"),
        "repeats": 2,
        "threads": 1,
        "kv_bytes": 8 << 20,
        "cold_starts": False,
        "quiet_share": float("inf"),  # whatever else this machine does
        "retries": 0,
    }
    return Plan(**given | changes)


def start_of(model, work, **changes):
    given = {"model": str(model), "prepared": None, "cache": str(work), "threads": 1, "max_len": 4096, "max_seqs": 64}
    return Start(**given | {"kv_bytes": 8 << 20} | changes)


def script(folder, body):
    """A peer in few lines: `body` is the inside of its class."""
    path = folder / "peer_mine.py"
    path.write_text(
        f"import os, sys, time\nsys.path.append({str(PEERS)!r})\n"
        f"from harness.protocol import Generated, Peer, serve\nclass Mine(Peer):\n{body}\nserve(Mine)\n"
    )
    return path


GOOD = (
    "    def __init__(self, start): print('noise of a library')\n"
    "    def generate(self, requests):\n"
    "        return Generated([[7] * r.num_output for r in requests], [time.monotonic()] * requests[0].num_output)"
)


def process(folder, body=GOOD):
    return PeerProcess("mine", sys.executable, script(folder, body), folder / "mine.log", 1)


def test_lab_answers_with_its_tokens_and_their_times(model, work):
    with PeerProcess("lab", sys.executable, PEERS / "peer_lab.py", work / "lab.log", 1) as lab:
        started = lab.start(start_of(model, work, options=["cache.block_size=8", "compile.mode=none"]), PATIENCE_S)
        one = lab.run([SHORT], PATIENCE_S)
        two = lab.run([SHORT, Request([60], 3)], PATIENCE_S)
    assert started.import_s > 0 and started.load_s > 0 and started.first_s > 0
    assert started.versions["torch"] and "cache.block_size=8" in started.settings
    assert one.token_ids == [[4, 5, 6, 7, 8]] and two.token_ids == [[4, 5, 6, 7, 8], [61, 62, 63]]
    assert one.token_times_s == sorted(one.token_times_s) and 0 < one.token_times_s[0] <= one.token_times_s[-1] <= one.seconds
    assert two.token_times_s is None
    assert one.peak_rss_bytes > 50e6


def test_what_a_library_prints_is_no_answer(work):
    with process(work) as mine:
        mine.start(start_of("m", work), PATIENCE_S)
        assert mine.run([SHORT], PATIENCE_S).token_ids == [[7] * 5]
    assert "noise of a library" in (work / "mine.log").read_text()


def test_a_peer_that_dies_is_told_with_its_last_words_but_not_in_the_message(work):
    body = "    def __init__(self, start): sys.exit('no such model')\n    def generate(self, requests): pass"
    with process(work, body) as mine, pytest.raises(PeerFailed, match=r"^mine ended with exit code 1$") as failure:
        mine.start(start_of("m", work), PATIENCE_S)
    assert failure.value.details == ["no such model"]


def test_a_peer_that_hangs_is_ended(work):
    body = GOOD.replace("return", "time.sleep(1000); return")
    with process(work, body) as mine:
        with pytest.raises(PeerFailed, match="did not answer in time"):
            mine.start(start_of("m", work), 1.0)
        with pytest.raises(PeerFailed, match="exit code -9"):
            mine.run([SHORT], PATIENCE_S)


def test_too_few_tokens_are_no_answer(work):
    with process(work, GOOD.replace("* r.num_output", "* 2")) as mine:
        mine.start(start_of("m", work), PATIENCE_S)
        with pytest.raises(PeerFailed, match="other numbers of tokens"):
            mine.run([SHORT], PATIENCE_S)


def test_a_paused_peer_and_its_children_stand_still(work):
    body = GOOD.replace("print(", "self.child = __import__('subprocess').Popen(['sleep', '1000']); print(") + (
        "\n    def versions(self): return {'child': str(self.child.pid)}"
    )
    with process(work, body) as mine:
        child = int(mine.start(start_of("m", work), PATIENCE_S).versions["child"])
        mine.pause()
        become(lambda: [machine.stat_fields(pid)[0] for pid in (mine.pid, child)] == ["T", "T"])
        mine.resume()
        become(lambda: "T" not in [machine.stat_fields(pid)[0] for pid in (mine.pid, child)])
        assert set(machine.process_tree(mine.pid)) == {mine.pid, child}
        os.kill(child, 9)


def become(condition):
    """Wait for what a signal brings about; the test's time limit ends it when it never does."""
    while not condition():
        time.sleep(0.01)


def test_the_watch_tells_others_work_from_the_peers():
    loop = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(loop) as busy, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        of_busy, of_idle = machine.OthersWatch(busy.pid), machine.OthersWatch(idle.pid)
        begin = machine.cpu_s_of(busy.pid)
        become(lambda: machine.cpu_s_of(busy.pid) - begin > 0.3)
        assert of_idle.share() > of_busy.share() >= 0
        busy.kill()
        idle.stdin.close()


def test_prompts_are_the_same_each_time_and_others_in_each_repeat():
    for name in workloads.WORKLOADS:
        first = workloads.requests_of(name, 0, encode)
        assert first == workloads.requests_of(name, 0, encode)
        other, warm_up = workloads.requests_of(name, 1, encode), workloads.warm_up_of(name, encode)
        assert [(len(r.prompt_ids), r.num_output) for r in first] == [(len(r.prompt_ids), r.num_output) for r in other]
        beginnings = [tuple(requests[0].prompt_ids[:16]) for requests in (first, other, warm_up)]
        assert len(set(beginnings)) == 3
        assert sum(r.num_output for r in warm_up) <= sum(r.num_output for r in first)


def test_workloads_have_the_sizes_they_are_named_for():
    w1, w2, w3, w4 = (workloads.requests_of(name, 0, encode) for name in workloads.WORKLOADS)
    assert [(len(r.prompt_ids), r.num_output) for r in w1 + w3] == [(128, 128), (2048, 1)]
    assert len(w2) == 64
    assert all(16 <= len(r.prompt_ids) <= 256 and 16 <= r.num_output <= 128 for r in w2)
    assert len(w4) == 32 and {(len(r.prompt_ids), r.num_output) for r in w4} == {(1056, 16)}
    assert len({tuple(r.prompt_ids[:1024]) for r in w4}) == 1
    assert len({tuple(r.prompt_ids) for r in w4}) == 32


def test_floors_count_the_work_by_hand(model):
    facts = DeviceFacts("test", "cpu", 1, 1 << 30, 40e9, {"bfloat16": 800e9}, "2026-01-01T00:00:00+00:00")
    config = read_config(model)
    of, plain = WorkloadFloors(config, facts), floors(config, "bfloat16", facts)
    head = 2 * 64 * 64
    attended = 4 * config.num_layers * config.num_heads * config.head_dim  # flops for each token attended to
    body = plain.flops_per_token - head

    def seconds(num_tokens, num_sampled, num_attended):
        return (num_tokens * body + num_sampled * head + num_attended * attended) / 800e9

    assert of.first_token_s(2048) == pytest.approx(seconds(2048, 1, 2048 * 2049 / 2))
    assert of.first_token_s(1) == pytest.approx(plain.step_s(1))  # so short a prompt waits for the weights
    assert of.decode_step_s(4, 3) == pytest.approx((plain.step_s(1, 5) + plain.step_s(1, 6)) / 2)
    two = [Request([0, 0, 1], 2), Request([0, 0, 2], 1)]  # positions 0-3 and 0-2
    assert of.all_at_once_s(two) == pytest.approx(seconds(7, 3, 10 + 6))
    assert of.all_at_once_s(two, 2) == pytest.approx(seconds(2 + 2 + 1, 3, 3 + (3 + 4) + 3))


@pytest.fixture
def light_lab(tmp_path, monkeypatch):
    """In lab's place a peer that is ready at once: it tells what its cache held, and its tokens follow from the prompts."""
    body = (
        "    def __init__(self, start):\n"
        "        self.kept = os.path.join(start.cache, 'kept')\n"
        "        self.held = 'kept' if os.path.exists(self.kept) else 'empty'\n"
        "        open(self.kept, 'w').close()\n"
        "    def versions(self): return {'cache': self.held}\n"
        "    def generate(self, requests):\n"
        "        ids = [[sum(i * t for i, t in enumerate(r.prompt_ids)) % 997] * r.num_output for r in requests]\n"
        "        begin = time.monotonic()\n"
        "        return Generated(ids, [begin + 1e-3 * i for i in range(len(ids[0]))] if len(ids) == 1 else None)"
    )
    script(tmp_path, body).rename(tmp_path / "peer_lab.py")
    monkeypatch.setattr(session, "SCRIPTS", tmp_path)


def test_a_session_measures_all_and_resumes(light_lab, model, work):
    lines = []
    first = Session(plan(model, work, repeats=1, cold_starts=True), encode, lines.append)
    first.run()
    record = first.records["lab"]
    assert record.failure is None
    assert len(record.starts["cold"]) == len(record.starts["warm"]) == 1
    assert [len(record.samples[w]) for w in ("w1", "w3")] == [1, 1]
    assert {"decode_tok_s", "ttft_ms", "itl_ms", "peak_mb"} == set(record.samples["w1"][0]["figures"])
    assert any("w3 #1 lab" in line for line in lines)
    ready = [line for line in lines if "ready with" in line]
    assert "ready with cold caches" in ready[0] and "cache empty" in ready[0]
    assert "ready with warm caches" in ready[1] and "cache kept" in ready[1] and len(ready) == 2

    again = Session(plan(model, work), encode, lines.append)
    assert again.load() == []
    again.run()
    samples = again.records["lab"].samples["w1"]
    assert samples[0] == record.samples["w1"][0] and len(samples) == 2
    assert samples[0]["token_ids"] != samples[1]["token_ids"]  # other prompts

    lines.clear()
    done = Session(plan(model, work), encode, lines.append)
    done.load()
    done.run()
    assert lines == []  # nothing was missing, so nothing was started

    assert Session(plan(model, work, threads=3), encode).load() == ["threads"]


def test_a_peer_that_fails_does_not_stop_the_others(light_lab, model, work):
    lines = []
    of_two = Session(
        plan(model, work, pythons={"vllm": "/bin/false", "lab": sys.executable}, workloads=("w1",)), encode, lines.append
    )
    of_two.run()
    assert of_two.records["vllm"].failure == "vllm ended with exit code 1"
    assert len(of_two.records["lab"].samples["w1"]) == 2
    assert any("out of this run" in line for line in lines)


def test_a_slow_workload_gets_no_more_than_three_samples(work):
    slow = Session(plan(Path("m"), work, slow_s=10), encode)
    slow.records["lab"] = _record([{"seconds": 11}] * 3)
    assert not slow._wanted("lab", "w1", 3)
    slow.records["lab"] = _record([{"seconds": 9}] * 3)
    assert slow._wanted("lab", "w1", 3)
    slow.records["lab"] = _record([{"seconds": 11}] * 2)
    assert slow._wanted("lab", "w1", 2)


def _record(samples):
    return session.PeerRecord(samples={"w1": samples})


def test_figures_of_a_sample():
    times = [0.1, 0.12, 0.14, 0.2]
    answer = {"seconds": 2.0, "token_ids": [[1, 2, 3, 4], [5, 6]], "token_times_s": times, "peak_rss_bytes": 3e8}
    w1 = tables.figures_of("w1", answer, 10)
    assert w1 == pytest.approx({"decode_tok_s": 30.0, "ttft_ms": 100.0, "itl_ms": 20.0, "peak_mb": 300.0})
    assert tables.figures_of("w2", answer, 10) == {"w2_tok_s": 3.0}
    assert tables.figures_of("w3", answer, 10) == {"w3_tok_s": 100.0}
    assert tables.figures_of("w4", answer, 10) == {"w4_s": 2.0}


def _peer(decode, w4, ready):
    w1 = [
        {"seconds": 1.0, "disturbed": False, "figures": {"decode_tok_s": d, "peak_mb": 100 + i}} for i, d in enumerate(decode)
    ]
    for sample in w1:
        sample["figures"] |= {"ttft_ms": 50.0, "itl_ms": 10.0}
    w4 = [{"seconds": w, "disturbed": True, "figures": {"w4_s": w}} for w in w4]
    starts = {"cold": [], "warm": [{"import_s": 9.0, "load_s": ready - 0.5, "first_s": 0.5}]}
    return {
        "versions": {"thing": "1.0"},
        "settings": "a | b",
        "failure": None,
        "starts": starts,
        "samples": {"w1": w1, "w4": w4},
        "agreement": {"w1": 0.5},
    }


@pytest.fixture
def results():
    return {
        "date": "2026-01-01",
        "model": "smollm2",
        "threads": 2,
        "workloads": {"w1": "one", "w4": "four"},
        "machine": {"name": "Chip", "cores": 2, "bandwidth_gb_s": 40.0, "bf16_gflop_s": 800.0},
        "floors": {"decode_tok_s": 160.0, "w4_s": 1.0},
        "reference": "transformers",
        "skipped": ["vllm"],
        "peers": {
            "transformers": _peer([40, 10, 50], [8.0], 3.0),
            "llamacpp": _peer([100.0], [9.0], 1.0),
            "lab": _peer([120.0], [2.0], 2.0),
        },
    }


def test_medians_take_the_middle_and_the_first_peak(results):
    found = tables.medians(results)
    assert found["transformers"]["decode_tok_s"] == 40
    assert found["transformers"]["peak_mb"] == 100
    assert found["transformers"]["ready_warm_s"] == 3.0
    assert "ready_cold_s" not in found["lab"] and "w2_tok_s" not in found["lab"]


def test_tables_compare_with_the_best_other_and_the_floor(results):
    text = tables.render(results)
    assert "| W1 decode, tok/s | 120.0 | 100.0 (llamacpp) | 1.20 | 160.0 | 75% |" in text
    assert "| W4, s | 2.00 | 8.00 (transformers) | 4.00 | 1.00 | 50% |" in text
    assert "| ready, warm caches, s | 2.0 | 1.0 (llamacpp) | 0.50 |  |  |" in text
    assert "| transformers | 10.0 to 50.0 (n=3) |" in text
    assert "8 samples, 3 of them on a CPU that others used as well" in text
    assert "| lab | 50% |  |" in text
    assert r"| lab | thing 1.0 | a \| b |  |" in text
    assert "| vllm |  |  | not installed |" in text


def test_agreement_counts_up_to_the_first_difference():
    assert tables.agreement([[1, 2, 9, 4], [5]], [[1, 2, 3, 4], [5]]) == pytest.approx(3 / 5)


def test_the_readme_keeps_what_is_around_the_tables(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    tables.write_readme(path, "new")
    assert path.read_text() == f"before\n{tables.BEGIN}\n\nnew\n\n{tables.END}\nafter\n"
    tables.write_readme(path, "newer")
    assert "new\n" not in path.read_text() and "newer" in path.read_text()
    path.write_text("no place")
    with pytest.raises(ValueError, match="markers"):
        tables.write_readme(path, "new")


def test_the_committed_tables_are_those_of_the_committed_results():
    results = PEERS / "results.json"
    readme = (PEERS / "README.md").read_text()
    text = tables.render(json.loads(results.read_text())) if results.is_file() else "Not measured yet."
    assert f"{tables.BEGIN}\n\n{text}\n\n{tables.END}" in readme
