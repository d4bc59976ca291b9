"""Where the records of a run go."""

import json
import logging
import os
import socket
import threading

import pytest
import wandb

from lab.bench.recorder import Sinks
from lab.contracts.sink import RunInfo, Sink
from lab.errors import UserError
from lab.metrics.sinks.jsonl import JsonlSink
from lab.metrics.sinks.wandb import SERIES, WandbSink, acceptance_bars, answers, choose_mode, flatten, has_key
from lab.settings import WandbSettings

STEP = {**dict.fromkeys(SERIES, 2), "step": 0, "t_s": 0.5}


@pytest.fixture
def no_account(tmp_path, monkeypatch):
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "netrc"


@pytest.fixture
def info(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return RunInfo(folder, {"seed": 3, "model": {"path": "tiny"}}, {"attention": {"name": "eager", "passed_over": {}}})


class Recording(Sink):
    """Notes what it is told, and fails where it is asked to."""

    name = "recording"

    def __init__(self, fails=""):
        super().__init__(None)
        self.fails = fails
        self.told = []

    def _note(self, what):
        self.told.append(what)
        if what == self.fails:
            raise RuntimeError("planted")

    def start(self, run):
        self._note("start")

    def step(self, record):
        self._note("step")

    def request(self, record):
        self._note("request")

    def finish(self, metrics, exit_code):
        self._note("finish")


def test_jsonl_lines_are_on_disk_at_once(info):
    sink = JsonlSink(None)
    sink.start(info)
    sink.step({"step": 0, "ms": 1.5})
    sink.request({"id": "0", "text": "caf\u00e9"})
    assert (info.folder / "steps.jsonl").read_bytes() == b'{"step":0,"ms":1.5}\n'
    assert json.loads((info.folder / "requests.jsonl").read_text()) == {"id": "0", "text": "caf\u00e9"}
    sink.finish({}, 0)


def test_jsonl_tells_a_full_disk(info):
    (info.folder / "steps.jsonl").symlink_to("/dev/full")
    sink = JsonlSink(None)
    sink.start(info)
    with pytest.raises(UserError, match="No space left"):
        sink.step({"step": 0})
    sink.finish({}, 2)


@pytest.mark.parametrize("fails", ["start", "step", "request", "finish"])
def test_a_sink_that_fails_is_logged_once_and_the_others_go_on(info, caplog, fails):
    own, bad, good = Recording(), Recording(fails), Recording()
    sinks = Sinks(own, [bad, good])
    with caplog.at_level(logging.WARNING, logger="lab"):
        sinks.start(info)
        for _ in range(3):
            sinks.step(STEP)
            sinks.request({})
        sinks.finish({}, 0)
    assert own.told == good.told == ["start", *["step", "request"] * 3, "finish"]
    assert bad.told[-1] == fails and bad.told.count(fails) == 1
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1 and "recording" in messages[0] and "planted" in messages[0]


def test_errors_of_the_run_folder_pass_through(info):
    with pytest.raises(RuntimeError, match="planted"):
        Sinks(Recording("start"), []).start(info)


def test_wandb_offline_keeps_everything_under_the_run_folder(info, no_account):
    settings = WandbSettings(mode="auto", project="p", group="g", job_type="sweep", name="n", tags=("a", "b"))
    sink = WandbSink(settings)
    sink.start(info)
    run = sink._run
    assert run.settings.mode == "offline"  # there is no key
    assert (run.project, run.group, run.job_type, run.name, run.tags) == ("p", "g", "sweep", "n", ("a", "b"))
    assert dict(run.config) == {"seed": 3, "model.path": "tiny", "resolved.attention": "eager"}
    for index in range(500):
        sink.step({**STEP, "step": index})
    (info.folder / "metrics.json").write_text("{}")
    code = {"alpha": 0.5, "acceptance_rate": 0.25}
    spec = {"acceptance_per_position": [0.75, 0.5]}
    sink.finish({"ttft_ms": {"mean": 2.5}, "num_requests": 1, "spec": spec, "categories": {"code": code}}, 0)
    wandb.teardown()  # as at the end of the process: its service has written everything
    (offline,) = (info.folder / "wandb").glob("offline-run-*")
    (record,) = offline.glob("*.wandb")
    content = record.read_bytes()
    assert b"model.path" in content and b"ttft_ms.mean" in content
    assert b"metrics.json" in content  # the artifact
    assert b"spec/acceptance_rate" in content and b"spec/by position" in content and b"spec/by category" in content
    assert content.count(b"step/num_tokens") < 20  # points, not a point for every step


def test_wandb_mode_is_online_only_with_a_key_and_an_answer(no_account, monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        assert choose_mode("auto") == "offline"
        no_account.write_text("machine 127.0.0.1 login user password secret\n")
        assert choose_mode("auto") == "online"
        assert choose_mode("offline") == "offline" and choose_mode("disabled") == "disabled"
        monkeypatch.setenv("WANDB_MODE", "offline")
        assert choose_mode("auto") == "offline"
        monkeypatch.delenv("WANDB_MODE")
    assert not answers(url)  # nobody listens there any more
    assert choose_mode("auto") == "offline"


def test_a_key_is_looked_for_in_the_environment_and_in_netrc(no_account, monkeypatch):
    url = "https://wandb.example.org"
    assert not has_key(url)
    no_account.write_text("machine other.example.org login user password secret\n")
    assert not has_key(url)
    no_account.write_text("this is no netrc file\n")
    assert not has_key(url)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert has_key(url)


def test_a_server_that_swallows_connections_is_not_waited_for(monkeypatch):
    never = threading.Event()

    def connect(*_):
        never.wait(60)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert not answers("http://127.0.0.1:1", seconds=0.05)
    never.set()


def test_flatten_keeps_what_is_not_a_mapping():
    assert flatten({"a": {"b": {"c": 1}, "d": [1, 2]}, "e": {}, "f": None}) == {"a.b.c": 1, "a.d": [1, 2], "e": {}, "f": None}


def test_acceptance_has_charts_where_there_were_drafts():
    spec = {"acceptance_per_position": [0.75, 0.5]}
    assert acceptance_bars({}) == {}
    assert acceptance_bars({"spec": spec, "categories": {"prose": {"num_requests": 1}}}) == {
        "by position": {"1": 0.75, "2": 0.5}
    }
    charts = acceptance_bars({"spec": spec, "categories": {"code": {"alpha": 0.5, "acceptance_rate": 0.25}}})
    assert charts["by category"] == {"code": 0.25}
