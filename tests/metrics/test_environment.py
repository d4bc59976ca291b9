"""env.json."""

import subprocess

from lab.metrics.environment import describe, git_state, peak_rss_bytes


def git(folder, *command):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *command], check=True, capture_output=True)


def test_the_environment_names_machine_and_software():
    found = describe("cpu")
    assert found["cpu"] and found["cores"] >= 1 and found["memory_bytes"] > 1 << 28
    assert found["torch"] and found["packages"]["numpy"] and found["device"] == "cpu"
    assert "gpu" not in found


def test_git_state_tells_commit_and_dirt(tmp_path):
    assert git_state(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path)["dirty"] is True


def test_peak_memory_is_in_bytes():
    assert 1 << 24 < peak_rss_bytes() < 1 << 40
