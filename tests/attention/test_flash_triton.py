"""The Triton kernels of flash in Triton's interpreter."""

from pathlib import Path

from tests.interpreter import run_interpreted

CASES = Path(__file__).with_name("interpreted_flash.py")
LEAST = 71  # tests that must have run


def test_every_kernel_in_the_interpreter():
    run_interpreted(CASES, LEAST)
