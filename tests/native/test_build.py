"""The builder of C++ extensions: once, whole, and again when anything that matters has changed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab import native
from lab.native import build

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
#include <ATen/core/TensorBase.h>
#include <torch/library.h>
#include "value.h"
static int64_t value() { return kValue; }
TORCH_LIBRARY(LAB_NAMESPACE, library) { library.def("value() -> int", &value); }
"""
EXPORT = '__attribute__((visibility("default")))'
LIGHT = f'extern "C" {EXPORT} int light() {{ return VALUE; }}\n'  # without torch's headers: compiles at once
LOAD = """
import sys, pathlib, torch
from lab import native
native.load("lab_test_value", [pathlib.Path(sys.argv[1])])
print(torch.ops.lab_test_value.value())
"""
LOAD_LIGHT = """
import ctypes, sys, pathlib, torch
from lab import native
native.load("lab_test_light", [pathlib.Path(sys.argv[1])], flags=sys.argv[2:])
files = list(native.build.cache_dir("native").glob("*.so"))
print("loaded", *sorted(ctypes.CDLL(str(f)).light() for f in files))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lab" / "native"


@pytest.fixture
def light(tmp_path):
    source = tmp_path / "light.cpp"
    source.write_text(LIGHT)
    return source


def start(script: str, *arguments: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process: subprocess.Popen) -> tuple[str, bool]:
    """What it printed, and whether it compiled."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out.strip(), "compiling" in err


def run(script: str, *arguments: object) -> tuple[str, bool]:
    return finish(start(script, *arguments))


def test_an_operator_is_built_once_and_again_when_a_header_changes(cache, tmp_path):
    source, header = tmp_path / "value.cpp", tmp_path / "value.h"
    source.write_text(SOURCE)
    header.write_text("constexpr int64_t kValue = 41;\n")
    assert run(LOAD, source) == ("41", True)
    assert run(LOAD, source) == ("41", False)
    header.write_text("constexpr int64_t kValue = 42;\n")
    assert run(LOAD, source) == ("42", True)


def test_flags_are_part_of_what_is_built(cache, light):
    assert run(LOAD_LIGHT, light, "-DVALUE=1") == ("loaded 1", True)
    assert run(LOAD_LIGHT, light, "-DVALUE=2") == ("loaded 1 2", True)
    assert run(LOAD_LIGHT, light, "-DVALUE=1") == ("loaded 1 2", False)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign"])
def test_a_damaged_library_is_built_anew_and_never_loaded(cache, light, damage):
    run(LOAD_LIGHT, light, "-DVALUE=3")
    (library,) = cache.glob("*.so")
    data = library.read_bytes()
    middle = len(data) // 2
    changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    library.write_bytes({"cut": data[:middle], "changed": changed, "empty": b"", "foreign": b"x" * 5000}[damage])
    assert run(LOAD_LIGHT, light, "-DVALUE=3") == ("loaded 3", True)
    assert build._is_whole(library)


def test_processes_that_start_at_once_build_once(cache, light):
    found = [finish(p) for p in [start(LOAD_LIGHT, light, "-DVALUE=5") for _ in range(3)]]
    assert [out for out, _ in found] == ["loaded 5"] * 3
    assert sum(compiled for _, compiled in found) == 1


def test_a_process_killed_while_it_builds_does_no_harm(cache, light, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\ncase "$1" in --version) ;; *) echo $$ > "$0.pid"; sleep 30 ;; esac\nexec c++ "$@"\n')
    slow.chmod(0o755)
    victim = start(LOAD_LIGHT, light, "-DVALUE=6", env=os.environ | {"CXX": str(slow)}, start_new_session=True)
    for _ in range(6000):
        if (tmp_path / "slow.pid").exists():
            break
        time.sleep(0.1)
    assert list(cache.glob("*.build")), "it was not building yet"
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert not list(cache.glob("*.so"))
    slow.write_text('#!/bin/sh\nexec c++ "$@"\n')  # prints another version than before only through the real compiler
    found, compiled = finish(start(LOAD_LIGHT, light, "-DVALUE=6", env=os.environ | {"CXX": str(slow)}))
    assert (found, compiled) == ("loaded 6", True)
    assert not list(cache.glob("*.build")), "what the killed one left is still there"


def test_without_a_compiler_the_message_says_what_to_install(cache, light, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert re.search(r"install g\+\+", native.available())
    with pytest.raises(native.BuildError, match=r"cannot build lab_test_light: no C\+\+ compiler"):
        native.load("lab_test_light", [light])


def test_a_failing_compiler_is_quoted(cache, tmp_path):
    source = tmp_path / "wrong.cpp"
    source.write_text("int f() { return undeclared_name; }\n")
    with pytest.raises(native.BuildError, match="undeclared_name"):
        native.load("lab_test_wrong", [source])
    assert not list(cache.glob("*.so")) and not list(cache.glob("*.build"))


def test_what_is_built_ahead_has_the_flags_that_loading_gives(cache, light):
    """Else a cold start builds such a library twice."""
    script = """
import sys, pathlib, time
from lab import native
sources, flags = {"lab_test_light": [pathlib.Path(sys.argv[1])]}, ("-DVALUE=7",)
native.build_ahead(sources, {"lab_test_light": flags})
while not list(native.build.cache_dir("native").glob("*.so")):
    time.sleep(0.01)
native.load("lab_test_light", *sources.values(), flags=flags)
"""
    _, compiled = finish(start(script, light))
    assert compiled and len(list(cache.glob("*.so"))) == 1


def test_libraries_build_ahead_side_by_side(cache, tmp_path):
    """What was begun ahead is waited for by `load`, which compiles nothing itself; a broken one is reported by `load` alone."""
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    whole = tmp_path / "whole.cpp"
    whole.write_text("int whole() { return 1; }\n")
    script = """
import sys, pathlib, time
from lab import native
sources = {"lab_test_whole": [pathlib.Path(sys.argv[1])], "lab_test_broken": [pathlib.Path(sys.argv[2])]}
native.build_ahead(sources)
while not (folder := native.build.cache_dir("native")) or len(list(folder.glob("*.lock"))) < 2:
    time.sleep(0.01)
native.load("lab_test_whole", sources["lab_test_whole"])
print("loaded")
try:
    native.load("lab_test_broken", sources["lab_test_broken"])
except native.BuildError as error:
    print(error)
"""
    printed, compiled = finish(start(script, whole, broken))
    assert printed.startswith("loaded\ncannot build lab_test_broken")
    assert compiled
    assert len(list(cache.glob("lab_test_whole*.so"))) == 1
