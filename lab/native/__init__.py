"""C++ extensions of torch, compiled once on the machine that runs them."""

from lab.native.build import BuildError, available, build_ahead, find_compiler, has_python_headers, load

__all__ = ["BuildError", "available", "build_ahead", "find_compiler", "has_python_headers", "load"]
