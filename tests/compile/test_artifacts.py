"""Compiled code on disk: found again, never trusted when it is not what was written, safe against others and against death."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lab.compile.artifacts import MANIFEST, Rejected, key_of, open_or_make, verified

ROOT = Path(__file__).resolve().parents[2]


class Store:
    """An entry of two files, and how often it was made and loaded."""

    def __init__(self, folder):
        self.folder = folder
        self.num_made = 0

    def make(self, folder):
        self.num_made += 1
        (folder / "code.py").write_text("x = 1\n")
        (folder / "deep").mkdir()
        (folder / "deep" / "kernel.so").write_bytes(b"\x7fELF" * 100)
        return {"program": [1, 2, 3]}

    def open(self):
        return open_or_make(self.folder, self.make, lambda entry: (entry.content, dict(entry.files)))


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "entries" / key_of({"a": 1}))


def test_made_once_and_found_again(store):
    first, was_there = store.open()
    assert not was_there
    second, was_there = store.open()
    assert was_there and second == first and store.num_made == 1
    assert first[0] == {"program": [1, 2, 3]} and set(first[1]) == {"code.py", "deep/kernel.so"}


def truncated(folder):
    path = folder / "deep" / "kernel.so"
    path.write_bytes(path.read_bytes()[:-1])


def changed(folder):
    (folder / "code.py").write_text("x = 2\n")


def missing(folder):
    (folder / "code.py").unlink()


def garbage_manifest(folder):
    (folder / MANIFEST).write_bytes(os.urandom(300))


def empty_manifest(folder):
    (folder / MANIFEST).write_text("")


def no_manifest(folder):
    (folder / MANIFEST).unlink()


def edited_manifest(folder):
    body = json.loads((folder / MANIFEST).read_text())
    body["content"]["program"] = [3, 2, 1]
    (folder / MANIFEST).write_text(json.dumps(body))


def list_as_manifest(folder):
    (folder / MANIFEST).write_text("[]")


def writable_by_others(folder):
    (folder / "code.py").chmod(0o666)


def folder_writable_by_others(folder):
    folder.chmod(0o777)


def a_link(folder):
    original = folder.parent / "elsewhere.py"
    (folder / "code.py").rename(original)
    (folder / "code.py").symlink_to(original)


def of_another_entry(folder):
    other = Store(folder.parent / key_of({"a": 2}))
    other.open()
    (folder / MANIFEST).write_bytes((other.folder / MANIFEST).read_bytes())


FAULTS = [
    *(truncated, changed, missing, garbage_manifest, empty_manifest, no_manifest, edited_manifest, list_as_manifest),
    *(writable_by_others, folder_writable_by_others, a_link, of_another_entry),
]


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda f: f.__name__)
def test_what_is_not_as_it_was_written_is_made_again(store, spoil):
    right, _ = store.open()
    spoil(store.folder)
    with pytest.raises(Rejected):
        verified(store.folder)
    found, was_there = store.open()
    assert found == right and not was_there and store.num_made == 2
    assert store.open() == (right, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_entry_of_another_user_is_not_loaded(store):
    store.open()
    os.chown(store.folder / "code.py", 12345, 12345)
    with pytest.raises(Rejected, match="another user"):
        verified(store.folder)


def test_a_file_in_the_place_of_an_entry(store):
    store.folder.parent.mkdir()
    store.folder.write_text("not a folder")
    assert store.open()[1] is False
    assert store.open()[1] is True


def test_code_that_stays_bad_is_an_error(store):
    def load(entry):
        raise ImportError("undefined symbol")

    with pytest.raises(RuntimeError, match="3 times in a row"):
        open_or_make(store.folder, store.make, load)
    assert store.num_made == 3


SCRIPT = """
    import sys, time
    from pathlib import Path
    from lab.compile.artifacts import open_or_make
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    def make(temporary):
        (temporary / "code.py").write_text("x = 1")
        with (folder.parent / "made").open("a") as file:
            file.write("1")
        time.sleep(seconds)
        return {}
    print(open_or_make(folder, make, lambda entry: list(entry.files)))
"""


def start(folder, seconds):
    folder.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_processes_at_once_make_it_once(tmp_path):
    folder = tmp_path / "entries" / "k"
    processes = [start(folder, 0.5) for _ in range(3)]
    outputs = [process.communicate(timeout=600)[0].strip() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sorted(outputs) == ["(['code.py'], False)", "(['code.py'], True)", "(['code.py'], True)"]
    assert (folder.parent / "made").read_text() == "1"


def test_killed_while_making_it_leaves_nothing_that_is_used(tmp_path):
    folder = tmp_path / "entries" / "k"
    process = start(folder, 3600)
    end = time.monotonic() + 600
    while not (folder.parent / "made").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not folder.exists() and list(folder.parent.glob(".k.tmp-*"))
    store = Store(folder)
    assert store.open()[1] is False and store.open()[1] is True
    assert not list(folder.parent.glob(".k.tmp-*"))
