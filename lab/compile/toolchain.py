"""The C++ compiler that Inductor needs on the CPU. Torch-free."""

import os
import shutil

COMPILERS = ("g++", "c++", "clang++")


def find_compiler() -> str | None:
    """That of CXX, or the first one found; None when there is none."""
    return next((found for name in (os.environ.get("CXX"), *COMPILERS) if name and (found := shutil.which(name))), None)
