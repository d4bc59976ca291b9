"""C++ extensions of torch, compiled once on the machine that runs them: `load` and, before it, `available`."""

from lab.native.build import BuildError, available, compiler, load

__all__ = ["BuildError", "available", "compiler", "load"]
