"""C++ extensions of torch, compiled once on the machine that runs them: `load` and, before it, `available`."""

from lab.native.build import BuildError, available, find_compiler, has_python_headers, load

__all__ = ["BuildError", "available", "find_compiler", "has_python_headers", "load"]
