"""Drafts that branch: after each text that they suppose there may be several guesses. Torch-free.

A node is a draft, and follows its parent: an earlier node, or ROOT, the last known token. So the first so many nodes of a tree
are a tree too. Depths count from 1. What node i supposes of the text, its ancestors and itself, is a set of bits: bit j is
node j.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROOT = -1
MOST_NODES = 63  # their bits fit a signed number of 64


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of some drafts; the tokens are beside it."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ancestors: tuple[int, ...]  # bits, the node itself included

    @classmethod
    def of(cls, parents: Sequence[int]) -> "Tree":
        """Raises ValueError, in words for a plugin's author, when they are no tree."""
        depths: list[int] = []
        ancestors: list[int] = []
        if len(parents) > MOST_NODES:
            raise ValueError(f"a tree of {len(parents)} nodes, and at most {MOST_NODES} can be verified")
        for node, parent in enumerate(parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has the parent {parent}, which must be {ROOT} or an earlier node")
            depths.append(1 if parent == ROOT else depths[parent] + 1)
            ancestors.append((0 if parent == ROOT else ancestors[parent]) | 1 << node)
        return cls(tuple(parents), tuple(depths), tuple(ancestors))

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)

    @property
    def is_chain(self) -> bool:
        return self.depth == len(self.parents)

    def children(self, node: int) -> list[int]:
        """The nodes after one, or after ROOT, in their order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def first(self, num: int) -> "Tree":
        """The tree of the first `num` nodes."""
        if num >= len(self.parents):
            return self
        return Tree(self.parents[:num], self.depths[:num], self.ancestors[:num])
