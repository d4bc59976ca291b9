"""The compiled pieces for CUDA: written by Inductor and compiled to machine code, on a machine that need not have a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.compile.units import inductor_session
from tests import rigs

SCRIPT = Path(__file__).with_name("cuda_pieces.py")
LAYERS = 3


def pieces(tmp_path, capability, *arguments):
    """What the script says of the first, the middle and the last one."""
    folder = rigs.mix(tmp_path / "model", hidden_size=128, num_hidden_layers=LAYERS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, str(SCRIPT), str(folder), str(capability), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return tuple(map(json.loads, done.stdout.splitlines()))


def sums(piece):
    """The kernels that Inductor made to reduce something."""
    return [name for name in piece["kernels"] if name.startswith(("triton_red", "triton_per"))]


@pytest.mark.parametrize(("capability", "target"), [(80, "sm_80"), (90, "sm_90a")])
def test_three_pieces_for_any_number_of_tokens(tmp_path, capability, target):
    first, middle, last = pieces(tmp_path, capability)
    for piece in (first, middle, last):
        assert sums(piece)
        assert piece["kernels"] and piece["targets"] == [target]
        assert piece["symbolic"]  # buffers are sized by the number of tokens, which is not known to the code
    products = [sum("mm" in call for call in piece["calls"]) for piece in (first, middle, last)]
    assert products == [1, 4, 3]  # qkv; o, gate and up, down, qkv; o, gate and up, down
    assert any("silu" in name for name in middle["kernels"]) and not any("silu" in name for name in first["kernels"])


def test_batch_invariant_pieces_leave_inductor_nothing_to_sum(tmp_path):
    """Every product and norm is an operator of lab's, and what is left are elements by themselves."""
    first, middle, last = pieces(tmp_path, 90, "invariant")
    assert first["calls"] == ["rms_norm", "linear"]
    assert middle["calls"] == ["linear", "add_rms_norm", "linear", "linear", "add_rms_norm", "linear"]
    assert last["calls"] == ["linear", "add_rms_norm", "linear", "linear", "add_rms_norm"]
    for piece in (first, middle, last):
        assert not sums(piece) and all(name.startswith("triton_poi") for name in piece["kernels"])
    assert any("silu" in name for name in middle["kernels"])


def test_a_session_leaves_no_cache_of_triton_behind(tmp_path, monkeypatch):
    """Inductor points Triton's cache to its own when it makes a kernel, and leaves it so: other kernels would land there."""
    for before in (None, "elsewhere"):
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        if before is not None:
            monkeypatch.setenv("TRITON_CACHE_DIR", before)
        with inductor_session(tmp_path / "work"):
            assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "work" / "triton")
        assert os.environ.get("TRITON_CACHE_DIR") == before
