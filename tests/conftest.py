"""Fixtures that several test folders use."""

import pytest

from lab import registry


@pytest.fixture
def own_registry(monkeypatch):
    """A registry that knows nothing yet, put away after the test. LAB_PLUGIN_PATH is unset."""
    monkeypatch.delenv(registry.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(registry, "_entries", {})
    monkeypatch.setattr(registry, "_seen_roots", set())
    monkeypatch.setattr(registry, "_user_roots", [])
    return registry
