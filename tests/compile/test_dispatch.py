"""The choice of a captured shape: total, stable on its own output, never a key that was not captured."""

import random

import pytest
import torch

from lab.capabilities import GRAPH_SUPPORT, Capabilities
from lab.compile.dispatch import GRAPH_MODES, BatchKey, Dispatcher, Modes, derived_sizes, settle
from lab.compile.setup import _dispatcher
from lab.settings import CompileSettings

EVERYTHING = {"graph_support": "any", "has_pieces": True, "uniform_q": 1}


def dispatcher(asked, sizes, *, max_rows=8, uniform_q=1, **facts):
    modes = settle(asked, **{**EVERYTHING, "uniform_q": uniform_q, **facts})
    return Dispatcher(modes, sizes, max_rows=max_rows, uniform_q=uniform_q)


def test_pads_to_the_next_size_and_runs_larger_batches_uncaptured():
    chosen = dispatcher("full_and_piecewise", [1, 2, 4, 8], max_rows=16)
    decode = [chosen.dispatch(n, n, uniform=True) for n in (1, 2, 3, 5, 8, 9)]
    assert [key.num_tokens for key in decode] == [1, 2, 4, 8, 8, 9]
    assert [key.mode for key in decode] == ["full"] * 5 + ["none"]
    assert [key.num_rows for key in decode[:5]] == [1, 2, 4, 8, 8]
    mixed = [chosen.dispatch(n, 2, uniform=False) for n in (3, 8, 9)]
    assert [(key.mode, key.num_tokens) for key in mixed] == [("piecewise", 4), ("piecewise", 8), ("none", 9)]


@pytest.mark.parametrize("asked", GRAPH_MODES)
def test_each_mode_runs_decode_and_mixed_steps_as_its_name_says(asked):
    chosen = dispatcher(asked, [1, 2, 4, 8])
    found = (chosen.dispatch(2, 2, uniform=True).mode, chosen.dispatch(3, 2, uniform=False).mode)
    expected = {
        "none": ("none", "none"),
        "piecewise": ("piecewise", "piecewise"),
        "full": ("full", "full"),
        "full_decode_only": ("full", "none"),
        "full_and_piecewise": ("full", "piecewise"),
    }
    assert found == expected[asked]


@pytest.mark.parametrize(
    ("asked", "facts", "decode", "mixed", "num_reasons"),
    [
        ("full", {"graph_support": "uniform"}, "full", "piecewise", 1),
        ("full", {"graph_support": "decode"}, "full", "piecewise", 1),
        ("full", {"graph_support": "never"}, "piecewise", "piecewise", 2),
        ("full", {"graph_support": "uniform", "has_pieces": False}, "full", "none", 1),
        ("full_decode_only", {"graph_support": "decode"}, "full", "none", 0),
        ("full_decode_only", {"graph_support": "never"}, "piecewise", "none", 1),
        ("full_decode_only", {"graph_support": "decode", "uniform_q": 4}, "piecewise", "none", 1),
        ("full_decode_only", {"graph_support": "uniform", "uniform_q": 4}, "full", "none", 0),
        ("full_and_piecewise", {"has_pieces": False}, "full", "none", 1),
        ("piecewise", {"has_pieces": False}, "none", "none", 1),
        ("none", {"graph_support": "never", "has_pieces": False}, "none", "none", 0),
    ],
)
def test_modes_are_lowered_to_what_is_declared_and_say_why(asked, facts, decode, mixed, num_reasons):
    modes = settle(asked, **{**EVERYTHING, **facts})
    assert (modes.decode, modes.mixed, len(modes.reasons)) == (decode, mixed, num_reasons)


@pytest.mark.parametrize("seed", range(40))
def test_any_step_gets_a_captured_key_that_holds_it(seed):
    rng = random.Random(seed)
    max_rows, uniform_q = rng.randint(1, 70), rng.choice([1, 1, 2, 5])
    sizes = sorted(rng.sample(range(1, 200), rng.randint(1, 12))) if seed % 2 else derived_sizes(max_rows, uniform_q, 2048)
    chosen = dispatcher(
        rng.choice(list(GRAPH_MODES)),
        sizes,
        max_rows=max_rows,
        uniform_q=uniform_q,
        graph_support=rng.choice(GRAPH_SUPPORT),
        has_pieces=rng.random() < 0.8,
    )
    captured = set(chosen.keys)
    assert len(captured) == len(chosen.keys)
    seen = set()
    for _ in range(300):
        rows = rng.randint(1, max_rows)
        uniform = rng.random() < 0.5
        tokens = rows * uniform_q if uniform else rows + rng.randint(0, 250)
        key = chosen.dispatch(tokens, rows, uniform=uniform)
        seen.add(key.mode)
        assert key.num_tokens >= tokens
        if key.mode == "none":
            assert key == BatchKey("none", tokens)
            continue
        assert key in captured
        assert not key.num_rows or rows <= key.num_rows <= max_rows
        again = chosen.dispatch(key.num_tokens, key.num_rows or rows, uniform=bool(key.uniform_q) or uniform)
        assert again == key or (not key.uniform_q and again.num_tokens >= key.num_tokens)
        if key.uniform_q:
            assert key.num_tokens == key.num_rows * key.uniform_q
    assert seen <= {"none", chosen.modes.decode, chosen.modes.mixed}


def test_a_decode_step_without_drafts_has_a_graph_of_its_own():
    chosen = dispatcher("full_and_piecewise", [1, 2, 4, 8, 40], uniform_q=5)
    assert chosen.dispatch(3, 3, uniform=False) == BatchKey("full", 4, 4, 1)
    assert chosen.dispatch(15, 3, uniform=True) == BatchKey("full", 40, 8, 5)
    assert chosen.dispatch(10, 2, uniform=True) == BatchKey("full", 10, 2, 5)
    assert chosen.dispatch(15, 3, uniform=False) == BatchKey("piecewise", 40)
    assert {key.uniform_q for key in chosen.keys if key.mode == "full"} == {1, 5}


def test_without_sizes_every_shape_will_do_and_nothing_is_padded():
    chosen = Dispatcher(Modes("full", "piecewise"), None, max_rows=64)
    assert chosen.keys == ()
    assert chosen.dispatch(37, 37, uniform=True) == BatchKey("full", 37, 37, 1)
    assert chosen.dispatch(1999, 3, uniform=False) == BatchKey("piecewise", 1999)


def test_derived_sizes_hold_a_full_decode_step():
    for max_rows, uniform_q in ((1, 1), (3, 1), (64, 1), (64, 4), (100, 5), (256, 1)):
        sizes = derived_sizes(max_rows, uniform_q, 2048)
        assert max_rows * uniform_q in sizes or max_rows * uniform_q > 512
        assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] <= 512


def test_graphs_without_a_compiled_model_are_given_up_for_that_reason(caplog):
    """On the CPU attention has no part in it, so it must not be blamed."""
    with caplog.at_level("INFO", "lab"):
        found = _dispatcher(CompileSettings(cudagraph_mode="full"), torch.device("cpu"), [_Backend], False, 4, 64, 1)
    assert (found.modes.decode, found.modes.mixed) == ("none", "none")
    (message,) = caplog.messages
    assert "compiled" in message and "attention" not in message


class _Backend:
    capabilities = Capabilities(graph="never")
