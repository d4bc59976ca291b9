"""Trees of drafts of a fixed shape, and what shape and options may be.

A shape is a list of choices, as Medusa's paper has them (Cai et al., https://arxiv.org/abs/2401.10774): the path (0, 2) is the
third most likely token after the most likely one. Without a list it is the product of all choices at each depth, pruned to the
nodes that are most often right if a token of rank k is right as often as RANK_SHARES says, wherever it stands.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.api import UserError

ROOT = -1  # the parent of a first node
MOST_NODES = 63  # that attention can verify
RANK_SHARES = (
    0.55,
    0.14,
    0.07,
    0.045,
    0.03,
    0.022,
    0.017,
    0.013,
    0.01,
    0.008,
)
DEFAULT_NODES, DEFAULT_DEPTH = 8, 3

TREES_WITH = {"depth": "Set spec.tree, or leave it out.", "top_k": "Set spec.tree=dynamic, or leave it out."}

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A draft's place in the tree."""

    parent: int  # place in the tree, -1 for the root
    depth: int  # from 1
    rank: int  # among the tokens that may follow its parent, 0 the most likely
    place: int  # among the nodes of its depth


class StaticTree:
    """A shape, its nodes in the order of how often they should be right: the first so many are a tree too."""

    def __init__(self, paths: Sequence[Path]) -> None:
        ordered = sorted(paths, key=lambda path: (-_worth(path), len(path), path))
        place_of = {path: place for place, path in enumerate(ordered)}
        self.depth = max(map(len, ordered))
        counts = [0] * (self.depth + 1)
        self.nodes = []
        for path in ordered:
            depth = len(path)
            self.nodes.append(Node(place_of.get(path[:-1], -1), depth, path[-1], counts[depth]))
            counts[depth] += 1
        self.parents = [node.parent for node in self.nodes]
        self.num_entries = len(set(self.parents) - {-1})  # nodes that have children

    def at(self, depth: int) -> list[int]:
        """The places of the nodes of a depth, in their order."""
        return [place for place, node in enumerate(self.nodes) if node.depth == depth]

    def children(self, place: int) -> list[int]:
        """The places of a node's children, or of the root's for -1, in the order of their ranks."""
        return sorted((i for i, node in enumerate(self.nodes) if node.parent == place), key=lambda i: self.nodes[i].rank)

    def ranks_after(self, places: Sequence[int]) -> int:
        """How many tokens must be known after each of these nodes."""
        return 1 + max((node.rank for node in self.nodes if node.parent in set(places)), default=-1)

    def rows(self, limits: Sequence[int], depths: Sequence[int]) -> list[list[int]]:
        """The places that each row gets: the first so many, none deeper than so."""
        return [
            [place for place, node in enumerate(self.nodes[:limit]) if node.depth <= depth]
            for limit, depth in zip(limits, depths, strict=True)
        ]


def parents_in(places: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The parents of some nodes of a tree, as places among these nodes; their parents are among them."""
    place_of = {place: i for i, place in enumerate(places)}
    return [-1 if parents[place] == -1 else place_of[parents[place]] for place in places]


def pruned_product(num_nodes: int, depth: int, width: int = len(RANK_SHARES)) -> list[Path]:
    """The `num_nodes` paths that are most often right, of at most so many tokens and ranks below `width`."""
    found: list[Path] = []
    waiting = [(-RANK_SHARES[0], (0,))]
    while waiting and len(found) < num_nodes:
        worth, path = heapq.heappop(waiting)
        found.append(path)
        rank = path[-1]
        if rank + 1 < width:
            heapq.heappush(waiting, (worth / RANK_SHARES[rank] * RANK_SHARES[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < depth:
            heapq.heappush(waiting, (worth * RANK_SHARES[0], (*path, 0)))
    return found


def static_tree(options: Any) -> StaticTree | None:
    """The tree of fixed shape that a proposer's options ask for, None for a chain. Raises UserError for what is none."""
    if options.tree in ("none", "auto"):
        refuse_shape(options)
        return None
    refuse_unused(options, "top_k")
    num = options.num_drafts
    if options.choices is None:
        num = checked_number("num_drafts", DEFAULT_NODES if num is None else num, 1, MOST_NODES)
        return StaticTree(pruned_product(num, depth_of(options)))
    tree = StaticTree(checked_choices(options.choices))
    if num not in (None, len(tree.nodes)):
        raise UserError(f"spec.num_drafts={num}, and spec.choices has {len(tree.nodes)} nodes: leave out the first.")
    if options.depth not in (None, tree.depth):
        raise UserError(f"spec.depth={options.depth}, and spec.choices is {tree.depth} deep: leave out the first.")
    return tree


def check_ranks(tree: StaticTree, num_tokens: int) -> None:
    """Raises UserError when a draft model that can propose so many tokens has none of some rank."""
    most = max(node.rank for node in tree.nodes)
    if most >= num_tokens:
        raise UserError(
            f"the tree asks for a token of rank {most}, and the head can propose {num_tokens} tokens: ranks count from 0."
        )


def no_shape_asked(options: Any) -> UserError:
    """The error for choices where no tree of fixed shape is asked for."""
    return UserError(f"spec.choices is the shape of a static tree, and spec.tree is {options.tree}. Set spec.tree=static.")


def refuse_shape(options: Any) -> None:
    """Raises UserError when the shape of a tree is given, and none is asked for by name."""
    refuse_unused(options, "top_k")
    if options.choices is not None:
        raise no_shape_asked(options)
    refuse_unused(options, "depth")


def refuse_unused(options: Any, name: str) -> None:
    """Raises UserError when an option is given that this shape of drafts does not have."""
    if (value := getattr(options, name, None)) is not None:
        raise UserError(f"spec.{name}={value} is of a tree, and spec.tree is {options.tree}. {TREES_WITH[name]}")


def depth_of(options: Any, default: int = DEFAULT_DEPTH) -> int:
    """Of the tree that is asked for. Raises UserError when there can be none so deep."""
    return checked_number("depth", default if options.depth is None else options.depth, 1, MOST_NODES)


def checked_choices(choices: Sequence[Sequence[int]]) -> list[Path]:
    """Paths as the user gave them. Raises UserError, with the numbers, for what is no tree."""
    paths = [tuple(path) for path in choices]
    known = set(paths)
    if not 1 <= len(paths) <= MOST_NODES:
        raise UserError(f"spec.choices has {len(paths)} nodes: a tree has 1 to {MOST_NODES}.")
    for place, path in enumerate(paths):
        where = f"spec.choices[{place}]={list(path)}"
        if not path or min(path) < 0:
            raise UserError(f"{where}: a path is one rank or more, each 0 (the most likely token) or above.")
        if paths.index(path) != place:
            raise UserError(f"{where}: the path is there already, as spec.choices[{paths.index(path)}].")
        if len(path) > 1 and path[:-1] not in known:
            raise UserError(f"{where}: its parent {list(path[:-1])} is not among spec.choices.")
    return paths


def checked_number(name: str, value: int, least: int, most: int) -> int:
    """An option's value. Raises UserError when it is not within least .. most."""
    if not least <= value <= most:
        raise UserError(f"spec.{name} must be a whole number from {least} to {most} for a tree, got {value}.")
    return value


def _worth(path: Path) -> float:
    worth = 1.0
    for rank in path:  # beyond the known ranks ever less, so that every child is worth less than its parent
        worth *= RANK_SHARES[rank] if rank < len(RANK_SHARES) else RANK_SHARES[-1] / (2 + rank - len(RANK_SHARES))
    return worth
