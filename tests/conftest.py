"""Fixtures that several test folders use."""

import os
import signal
from pathlib import Path

# Before torch is imported: threads that wait sleep. Spinning ones make the suite many times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest  # noqa: E402

from lab import registry  # noqa: E402
from lab.cache import cache_dir  # noqa: E402

# A suite that runs in the background may have been started with Ctrl-C ignored, and so would every command that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

NATIVE = cache_dir("native")  # of the cache that is in force before any test takes one of its own


def lend_native(cache_home: Path) -> None:
    """Give a test's own cache the C++ kernels that are built already: each build takes half a minute of processor time."""
    (cache_home / "lab").mkdir(parents=True, exist_ok=True)
    (cache_home / "lab" / "native").symlink_to(NATIVE)


@pytest.fixture
def own_registry(monkeypatch):
    """A registry that knows nothing yet, put away after the test. LAB_PLUGIN_PATH is unset."""
    monkeypatch.delenv(registry.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(registry, "_entries", {})
    monkeypatch.setattr(registry, "_seen_roots", set())
    monkeypatch.setattr(registry, "_user_roots", [])
    monkeypatch.setattr(registry, "_unparsed", {})
    return registry
