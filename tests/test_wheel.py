"""The wheel: it holds all that lab needs, and works from an empty folder where nothing of the checkout is in sight."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lab", "plugins", "conf")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the checkout without network: setuptools comes with the test extra."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*command, "--wheel-dir", str(folder), str(source)], cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A virtual environment with the wheel in it; its dependencies are those of the running interpreter."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)], cwd=ROOT)
    python = venv / "bin" / "python"
    site = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], cwd=venv).strip())
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run([*command, str(wheel)], cwd=venv)
    (site / "dependencies.pth").write_text(
        sysconfig.get_path("purelib")
    )  # its own .pth files, the checkout's too, are not read
    return venv


def run(command: list[str], cwd: Path, **extra: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LAB_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=kept | extra, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_holds_every_file_of_the_packages(wheel):
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "conf/config.yaml" in expected
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_the_installed_package_is_the_one_that_runs(installed, tmp_path):
    found = run([str(installed / "bin" / "python"), "-c", "import lab; print(lab.__file__)"], cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(installed)


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["plugins", "attention.eager"]], ids=" ".join)
def test_the_command_works_from_an_empty_folder(installed, tmp_path, arguments):
    assert run([str(installed / "bin" / "lab"), *arguments], cwd=tmp_path).strip()
    assert list(tmp_path.iterdir()) == []


def test_a_run_works_from_an_empty_folder(installed, tmp_path):
    from tests import rigs

    model = rigs.echo(tmp_path / "model")
    empty = tmp_path / "empty"
    empty.mkdir()
    overrides = [f"model.path={model}", "+workload=random", "tracking.wandb.mode=disabled", f"hydra.run.dir={tmp_path}/run"]
    run([str(installed / "bin" / "lab"), "run", *overrides], cwd=empty, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (tmp_path / "run" / "metrics.json").is_file()
    assert list(empty.iterdir()) == []
