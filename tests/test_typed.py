"""Typed dataclasses from plain data."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from lab.errors import UserError
from lab.typed import describe, from_plain


@dataclass(frozen=True)
class Inner:
    size: int = 1
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    on: bool = False
    limit: int | None = None
    mode: Literal["fast", "exact", 3] = "fast"
    tags: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    numbers: list[float] = field(default_factory=list)
    by_name: dict[str, float] = field(default_factory=dict)
    either: int | str = 0
    anything: Any = None


def test_values_are_kept_and_only_what_loses_nothing_is_converted():
    data = {
        "name": "x",
        "inner": {"size": 3, "share": 1},
        "on": True,
        "limit": 4,
        "mode": 3,
        "tags": ["a", "b"],
        "pair": [1, 2],
        "numbers": [1, 2.5],
        "by_name": {"a": 1},
        "either": "seven",
        "anything": {"deep": [None]},
    }
    made = from_plain(Outer, data, "")
    assert made == Outer(
        "x", Inner(3, 1.0), True, 4, 3, ("a", "b"), (1, 2.0), [1.0, 2.5], {"a": 1.0}, "seven", {"deep": [None]}
    )
    assert isinstance(made.inner.share, float) and isinstance(made.by_name["a"], float) and isinstance(made.pair[1], float)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "part.name must be given: text."),
        ({"name": 3}, "part.name must be text; got 3. To give it as text, quote it twice: part.name='\"3\"'."),
        ({"name": "x", "on": 1}, "part.on must be true or false; got 1."),
        ({"name": "x", "limit": True}, "part.limit must be a whole number or null; got true."),
        ({"name": "x", "limit": 1.0}, "part.limit must be a whole number or null; got 1.0."),
        ({"name": "x", "inner": {"share": True}}, "part.inner.share must be a number; got true."),
        ({"name": "x", "inner": {"share": "0.5"}}, "part.inner.share must be a number; got '0.5'."),
        ({"name": "x", "inner": 3}, "part.inner must be a mapping; got 3."),
        ({"name": "x", "inner": {"siez": 3}}, "no setting 'part.inner.siez'. Did you mean 'part.inner.size'?"),
        ({"name": "x", "mode": "exat"}, "part.mode must be one of fast, exact, 3; got 'exat'. Did you mean 'exact'?"),
        ({"name": "x", "mode": True}, "part.mode must be one of fast, exact, 3; got true."),
        ({"name": "x", "tags": "a"}, "part.tags must be a list, each text; got 'a'."),
        ({"name": "x", "tags": ["a", 2]}, "part.tags[1] must be text; got 2."),
        ({"name": "x", "pair": [1]}, "part.pair must be a list of 2 values; got [1]."),
        ({"name": "x", "by_name": {"a": "b"}}, "part.by_name.a must be a number; got 'b'."),
        ({"name": "x", "by_name": []}, "part.by_name must be a mapping; got []."),
        ({"name": "x", "either": 1.5}, "part.either must be a whole number or text; got 1.5."),
    ],
)
def test_a_bad_value_is_named_with_what_is_wanted(data, message):
    with pytest.raises(UserError) as error:
        from_plain(Outer, data, "part")
    assert str(error.value).startswith(message)


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(UserError, match=r"no setting 'colour'\.\nAvailable: name, inner, on"):
        from_plain(Outer, {"name": "x", "colour": 1}, "")


def test_hints_in_words():
    assert describe(int | None) == "a whole number or null"
    assert describe(tuple[str, ...]) == "a list, each text"
    assert describe(dict[str, int]) == "a mapping"
