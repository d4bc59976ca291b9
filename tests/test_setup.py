"""scripts/setup, scripts/run and scripts/test on a small stand-in project: real virtual environments and pip, no network."""

import ensurepip
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "stand-in"
"""

BACKEND = '''\
"""A build backend without dependencies: an editable wheel is a .pth file. It waits, or fails, when a file says so."""

import pathlib, time, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    here = pathlib.Path(__file__).parent
    with open(here / "builds.txt", "a") as builds:
        builds.write("build\\n")
    while (here / "hang").exists():
        time.sleep(0.05)
    if (here / "fail").exists():
        raise SystemExit("the build was told to fail")
    name = "stand_in-1-py3-none-any.whl"
    info = "stand_in-1.dist-info/"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as wheel:
        wheel.writestr("stand_in.pth", str(here))
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: stand-in\\nVersion: 1\\nProvides-Extra: test\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
'''

ECHO = "import os, sys\nprint('ran', __name__, os.getcwd(), sys.argv[1:])\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkout of the stand-in project, in a folder with a space in its name, with the set-up done once."""
    checkout = make_checkout(tmp_path_factory.mktemp("set up") / "check out")
    first = script(checkout, "setup")
    assert first.returncode == 0, first.stderr
    return checkout, first


@pytest.fixture
def fresh(tmp_path):
    return make_checkout(tmp_path / "checkout")


def make_checkout(root: Path) -> Path:
    shutil.copytree(REPOSITORY / "scripts", root / "scripts")
    (root / "lab").mkdir()
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "constraints.txt").write_text("")
    (root / "backend.py").write_text(BACKEND)
    (root / "lab" / "__main__.py").write_text(ECHO)
    (root / "pytest.py").write_text(ECHO)
    return root


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LAB_", "VIRTUAL_ENV", "PYTHON"))}
    return kept | {"LAB_PYTHON": sys.executable} | extra


def script(root: Path, name: str, *arguments: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [str(root / "scripts" / name), *arguments]
    return subprocess.run(
        command, cwd=cwd or root, env=environment(**extra), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def builds(root: Path) -> int:
    return len((root / "builds.txt").read_text().splitlines())


def wait_for(condition, seconds=600.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def test_the_first_run_makes_an_environment_and_says_each_step(made):
    _, first = made
    assert first.stdout == ""  # standard output belongs to the job
    steps = first.stderr.splitlines()
    assert all(line.startswith("setup: ") for line in steps)
    assert "making the virtual environment" in steps[0]
    assert "installing" in steps[1]


def test_a_second_run_installs_nothing(made):
    checkout, _ = made
    before = builds(checkout)
    again = script(checkout, "setup")
    assert again.returncode == 0
    assert "ready" in again.stderr and "installing" not in again.stderr
    assert builds(checkout) == before


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "told"),
    [
        ("2.13.0+cpu", None, None, "torch 2.13.0+cpu built for the CPU"),
        ("2.13.0+cu130", "13.0", None, "torch 2.13.0+cu130 built for CUDA 13.0"),
        ("2.13.0+rocm7", None, "7.0", "torch 2.13.0+rocm7 built for ROCm 7.0"),
    ],
)
def test_the_last_line_says_which_torch_there_is(made, version, cuda, hip, told):
    checkout, _ = made
    (checkout / "torch").mkdir(exist_ok=True)
    (checkout / "torch" / "__init__.py").write_text("raise SystemExit('this takes seconds')")
    (checkout / "torch" / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n")
    done = script(checkout, "setup")
    assert done.stderr.splitlines()[-1].endswith(f", {told})"), done.stderr
    shutil.rmtree(checkout / "torch")


def test_run_passes_its_arguments_on_and_stays_in_the_callers_folder(made, tmp_path):
    checkout, _ = made
    (tmp_path / "lab.py").write_text("raise SystemExit('a file of the working folder was run')")
    done = script(checkout, "run", "+attention=sdpa", "a b", cwd=tmp_path)
    assert done.stdout == f"ran __main__ {tmp_path} ['run', '+attention=sdpa', 'a b']\n", done.stderr


def test_test_passes_its_arguments_on_and_works_in_the_checkout(made, tmp_path):
    checkout, _ = made
    done = script(checkout, "test", "tests/kv", "-k", "a name", cwd=tmp_path)
    assert done.stdout.startswith(f"ran __main__ {checkout} ["), done.stderr
    assert done.stdout.endswith("'tests/kv', '-k', 'a name']\n"), done.stdout


def test_scripts_work_through_a_symbolic_link(made, tmp_path):
    checkout, _ = made
    (tmp_path / "go").symlink_to(checkout / "scripts" / "run")
    done = subprocess.run([tmp_path / "go"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.stdout == f"ran __main__ {tmp_path} ['run']\n", done.stderr


def test_changed_dependencies_are_installed_and_a_failed_install_is_tried_again_in_place(made):
    checkout, _ = made
    before = builds(checkout)
    (checkout / "constraints.txt").write_text("# changed\n")
    (checkout / "fail").touch()
    failed = script(checkout, "run")
    assert failed.returncode == 1 and failed.stdout == ""
    assert "the build was told to fail" in failed.stderr and "install.log" in failed.stderr
    (checkout / "fail").unlink()
    mended = script(checkout, "run")
    assert mended.returncode == 0 and mended.stdout
    assert "making the virtual environment" not in mended.stderr
    assert builds(checkout) == before + 2


def test_two_at_once_install_once(made):
    checkout, _ = made
    before = builds(checkout)
    (checkout / "constraints.txt").write_text("# changed again\n")
    (checkout / "hang").touch()
    command = [checkout / "scripts" / "setup"]
    first = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: builds(checkout) == before + 1)
    second = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    assert "waiting for another set-up" in second.stderr.readline()
    (checkout / "hang").unlink()
    assert first.wait() == 0 and second.wait() == 0
    assert "ready" in second.stderr.read()
    assert builds(checkout) == before + 1


def test_an_interrupted_install_is_made_anew(fresh):
    (fresh / "hang").touch()
    first = subprocess.Popen(
        [fresh / "scripts" / "setup"], env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: (fresh / "builds.txt").exists())
    os.killpg(first.pid, signal.SIGINT)
    assert first.wait() != 0
    (fresh / "hang").unlink()
    (fresh / ".venv" / "remains").touch()
    second = script(fresh, "setup")
    assert second.returncode == 0, second.stderr
    assert "removing the unfinished" in second.stderr
    assert not (fresh / ".venv" / "remains").exists()


@pytest.fixture
def debians_python(tmp_path):
    """Environment variables for a Python that lacks ensurepip, and the folder for further commands, first in PATH."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "ensurepip.py").write_text("raise ImportError('as Debian ships it')")
    commands = tmp_path / "bin"
    commands.mkdir()
    command(commands / "python", f"PYTHONPATH='{tmp_path}/hidden' exec '{sys.executable}' \"$@\"")
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return commands, {"LAB_PYTHON": str(commands / "python"), "PATH": path}


def test_root_gets_the_venv_module_from_apt(fresh, tmp_path, debians_python):
    commands, variables = debians_python
    command(commands / "id", "echo 0")
    command(commands / "apt-get", f"echo \"$@\" >>'{tmp_path}/apt'; [ $2 = update ] || rm -r '{tmp_path}/hidden'")
    done = script(fresh, "setup", **variables)
    assert done.returncode == 0, done.stderr
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (tmp_path / "apt").read_text() == f"-qq update\n-qq install -y python{version}-venv\n"
    assert f"installing python{version}-venv with apt-get" in done.stderr


def test_without_root_pip_comes_from_the_python_that_has_it(fresh, debians_python):
    commands, variables = debians_python
    command(commands / "id", "echo 1000")
    command(commands / "apt-get", "echo 'apt-get was called' >&2; exit 1")
    bundled = Path(ensurepip.__file__).parent / "_bundled"
    done = script(fresh, "setup", **variables, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(bundled))
    assert done.returncode == 0, done.stderr
    assert "ready" in done.stderr and "apt-get" not in done.stderr


def test_a_python_that_cannot_make_environments_is_told_what_to_install(fresh, tmp_path, debians_python):
    commands, variables = debians_python
    command(commands / "id", "echo 1000")
    for module in ("pip", "virtualenv"):
        (tmp_path / "hidden" / f"{module}.py").write_text("raise ImportError('not there')")
    refused = script(fresh, "setup", **variables)
    assert refused.returncode == 1
    assert "apt-get install python3." in refused.stderr


def command(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_a_folder_that_is_not_ours_is_left_alone(fresh, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.tex").touch()
    refused = script(fresh, "setup", LAB_VENV=str(theirs))
    assert refused.returncode == 1
    assert "was not made by this script" in refused.stderr
    assert [p.name for p in theirs.iterdir()] == ["thesis.tex"]


def test_an_unsuitable_python_is_refused(fresh, tmp_path):
    only = tools(tmp_path / "bin")
    old = only / "python3"
    command(old, '[ "$1" = -V ] && echo Python 3.9.2')
    refused = script(fresh, "setup", LAB_PYTHON=str(old))
    assert refused.returncode == 1
    assert f"LAB_PYTHON={old} is not Python 3.11, 3.12 or 3.13" in refused.stderr
    refused = script(fresh, "setup", LAB_PYTHON="", PATH=str(only))
    assert refused.returncode == 1
    assert "found python3: Python 3.9.2, python3.13: none, python3.12: none, python3.11: none" in refused.stderr
    assert not (fresh / ".venv").exists()


def test_a_missing_compiler_is_one_warning(made, tmp_path):
    checkout, _ = made
    done = script(checkout, "run", PATH=str(tools(tmp_path / "bin")))
    assert done.returncode == 0 and done.stdout, done.stderr
    assert done.stderr.count("warning") == 1 and "apt-get install g++" in done.stderr


def tools(folder: Path) -> Path:
    """A folder for PATH with the few commands that the scripts use, and so without Python and compilers."""
    folder.mkdir()
    for name in ("bash", "env", "dirname", "readlink", "realpath", "cat", "sha256sum", "cut", "flock", "mkdir", "ls"):
        (folder / name).symlink_to(shutil.which(name))
    return folder
