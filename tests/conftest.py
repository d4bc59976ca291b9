"""Fixtures that several test folders use."""

import os

# Before torch is imported: threads that wait sleep. Spinning ones make the suite many times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest  # noqa: E402

from lab import registry  # noqa: E402


@pytest.fixture
def own_registry(monkeypatch):
    """A registry that knows nothing yet, put away after the test. LAB_PLUGIN_PATH is unset."""
    monkeypatch.delenv(registry.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(registry, "_entries", {})
    monkeypatch.setattr(registry, "_seen_roots", set())
    monkeypatch.setattr(registry, "_user_roots", [])
    monkeypatch.setattr(registry, "_unparsed", {})
    return registry
