"""Which layers share a block table, and what of a row each of these groups keeps. Torch-free.

A layer declares what it needs of the cache as data: a kind (`Full` or `Sliding`) and the shape of its page, which is its part
of a block. Layers of one kind see the same blocks of a row, so they share a block table; layers of different kinds do not, or
the blocks that lie behind a window could never be given back while a layer beside it needs all of them.

One pool serves all groups. Every group has the same number of layers, and the i-th layer of each lies in the i-th tensor of
the pool: a block is a place in each of these tensors, and whichever group holds it, that group's layers use it. So a block
takes the same bytes for every group, each may take any free one, and no share of the memory is set aside for a kind. A kind
with more layers than a group is split into several, with a table each; where the numbers do not come out even, the last group
has places without a layer, and what its blocks hold there is wasted. The size of a group is the one that makes a row of full
length take the least. With one kind of layers there is one group, every layer has a tensor of its own, and nothing is wasted.

Another kind of cache (a latent, a recurrent state) is another class with rules of its own, and other groups of layers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Full:
    """A token reads all tokens before it."""

    def first_needed(self, position: int) -> int:
        """The first position that a token at `position` reads."""
        return 0

    def most_tokens(self, num_tokens: int, reach: int) -> int:
        """Tokens that a row of up to `num_tokens` must keep at a time, while it computes up to `reach` more of them."""
        return num_tokens


@dataclass(frozen=True, slots=True)
class Sliding:
    """A token reads itself and the `window` - 1 tokens before it."""

    window: int

    def first_needed(self, position: int) -> int:
        return max(0, position - self.window + 1)

    def most_tokens(self, num_tokens: int, reach: int) -> int:
        return min(num_tokens, self.window - 1 + reach)


Need = Full | Sliding


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer needs. Layers with equal pages can lie in each other's place."""

    need: Need
    page: tuple  # shape and dtype of the layer's part of a block


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups of a model's layers."""

    needs: tuple[Need, ...]  # of each group
    group_of: tuple[int, ...]  # of each layer
    place_of: tuple[int, ...]  # of each layer: the tensor of the pool that it lies in

    @property
    def num_groups(self) -> int:
        return len(self.needs)

    @property
    def is_plain(self) -> bool:
        """Whether there is one group, which keeps everything."""
        return self.needs == (Full(),)


def need_of(window: int | None, max_len: int) -> Need:
    """What a layer of this window needs of rows of up to `max_len` tokens; None sees all."""
    return Full() if window is None or window >= max_len else Sliding(window)


def group_layers(layers: Sequence[LayerCache], max_len: int) -> Grouping:
    """The groups for rows of up to `max_len` tokens.

    Layers of several kinds whose pages differ cannot share memory: they make one group, which keeps what the greediest of them
    needs.
    """
    counts = Counter(layer.need for layer in layers)
    if len(counts) == 1 or len({layer.page for layer in layers}) > 1:
        need = max(counts, key=lambda need: need.most_tokens(max_len, 1))
        return Grouping((need,), (0,) * len(layers), tuple(range(len(layers))))
    size = _group_size(counts, max_len)
    needs: list[Need] = []
    filling: dict[Need, tuple[int, int]] = {}  # of each kind: the group that takes its next layer, and the place in it
    group_of, place_of = [], []
    for layer in layers:
        group, place = filling.get(layer.need, (0, size))
        if place == size:
            group, place = len(needs), 0
            needs.append(layer.need)
        filling[layer.need] = group, place + 1
        group_of.append(group)
        place_of.append(place)
    return Grouping(tuple(needs), tuple(group_of), tuple(place_of))


def _group_size(counts: Counter[Need], max_len: int) -> int:
    """Layers of a group such that a row of `max_len` tokens takes the least memory; among equals the fewest groups."""

    def cost(size: int) -> tuple[int, int]:
        groups = {need: -(-count // size) for need, count in counts.items()}
        return sum(n * size * need.most_tokens(max_len, 1) for need, n in groups.items()), sum(groups.values())

    return min(range(min(counts.values()), max(counts.values()) + 1), key=cost)
