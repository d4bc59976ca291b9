"""Contract checks of draft proposers: what the core relies on, whatever the drafts are worth."""

from dataclasses import replace
from typing import Any

import numpy as np

from lab.checks import CheckFailed, NotDeclared
from lab.checks.spec_runs import check_outputs as check_outputs
from lab.checks.spec_runs import check_seeds as check_seeds
from lab.checks.spec_runs import is_bound
from lab.contracts.spec import Draft, Proposer, ProposeView
from lab.registry import Entry
from lab.sample.tree import Tree
from lab.sampling_params import SamplingParams
from lab.types import NewRow

VOCAB_SIZE = 97
UNWRITTEN = np.iinfo(np.int32).max  # stands past the end of each row, where no proposer may look


def check_limits(entry: Entry, options: Any) -> None:
    """No row gets more drafts than its limit or than num_drafts, and a row with limit 0 gets none."""
    proposer = _proposer(entry, options)
    for limit in range(proposer.num_drafts + 3):
        for shift in (0, 1):
            view = _view(_texts(), limits=[max(0, limit - shift * (row % 3)) for row in range(len(_texts()))])
            _drafts(proposer, view)


def check_short_contexts(entry: Entry, options: Any) -> None:
    """Contexts of one token up are served, alone and beside long ones, and so is a step without rows."""
    proposer = _proposer(entry, options)
    for length in range(1, 9):
        _drafts(proposer, _view([[7] * length]))
        _drafts(proposer, _view([list(range(length)), [1, 2, 3] * 30, [5]]))
    _drafts(proposer, _view([]))


def check_ids(entry: Entry, options: Any) -> None:
    """Drafts are plain ints within the vocabulary, and nothing past the end of a row is read."""
    drafts = _drafts(_proposer(entry, options), _view(_texts()))
    for row, token_ids in enumerate(drafts):
        for token in token_ids:
            if type(token) is not int:
                raise CheckFailed(f"row {row}: draft {token!r} is a {type(token).__name__}, not an int")
            if token == UNWRITTEN:
                raise CheckFailed(f"row {row}: it proposes what stands past the end of the row (lengths_R ends the tokens)")
            if not 0 <= token < VOCAB_SIZE:
                raise CheckFailed(f"row {row}: draft {token} is outside the vocabulary of {VOCAB_SIZE}")


def check_deterministic(entry: Entry, options: Any) -> None:
    """The same view gives the same drafts, from the same proposer and from a new one."""
    proposer = _proposer(entry, options)
    first = _drafts(proposer, _view(_texts()))
    if _drafts(proposer, _view(_texts())) != first:
        raise CheckFailed("the same view gave other drafts the second time")
    if _drafts(_proposer(entry, options), _view(_texts())) != first:
        raise CheckFailed("a new proposer with the same options gave other drafts")


def check_rows_are_addressed(entry: Entry, options: Any) -> None:
    """Drafts follow rows_R: the same text gets the same drafts in any row, in any order, alone or beside others."""
    texts = _texts()
    together = _drafts(_proposer(entry, options), _view(texts))
    backwards = _drafts(_proposer(entry, options), _view(texts, backwards=True))
    if backwards != together:
        raise CheckFailed("drafts depend on where a row stands in tokens_RC: index it with rows_R")
    for text, drafts in zip(texts, together, strict=True):
        if _drafts(_proposer(entry, options), _view([text]))[0] != drafts:
            raise CheckFailed(f"a text of {len(text)} tokens gets other drafts alone than beside other rows")


def check_view_is_left_alone(entry: Entry, options: Any) -> None:
    """The view is not written to: its arrays are the engine's own rows."""
    view = _view(_texts())
    fields = ("tokens_RC", "rows_R", "lengths_R", "limits_R")
    before = {name: getattr(view, name).copy() for name in fields}
    _drafts(_proposer(entry, options), view)
    for name in fields:
        if not np.array_equal(getattr(view, name), before[name]):
            raise CheckFailed(f"it wrote to {name} of the view; copy what you change")


def check_probabilities(entry: Entry, options: Any) -> None:
    """When distributions are given, each draft has its own, it sums to one, and the draft is possible under it."""
    draft = _propose(_proposer(entry, options), _view(_texts()))
    if draft.probs_RSV is None:
        raise NotDeclared("its drafts have no probs_RSV")
    probs_RSV = draft.probs_RSV.double().cpu()
    most = max(len(token_ids) for token_ids in draft.token_ids)
    if probs_RSV.dim() != 3 or len(probs_RSV) != len(draft.token_ids) or probs_RSV.shape[1] < most:
        raise CheckFailed(
            f"probs_RSV has shape {tuple(probs_RSV.shape)} for {len(draft.token_ids)} rows of up to {most} drafts"
        )
    for row, token_ids in enumerate(draft.token_ids):
        for place, token in enumerate(token_ids):
            probs_V = probs_RSV[row, place]
            if not (bool((probs_V >= 0).all()) and abs(float(probs_V.sum()) - 1.0) < 1e-3):
                raise CheckFailed(f"row {row}, draft {place}: its distribution is not one (sum {float(probs_V.sum()):.6f})")
            if float(probs_V[token]) <= 0:
                raise CheckFailed(
                    f"row {row}, draft {place}: token {token} has probability 0 in the distribution it is drawn from"
                )


def check_trees(entry: Entry, options: Any) -> None:
    """If it proposes trees: parents stand before their children, none is deeper than depths_R, and some row's drafts branch."""
    proposer = _proposer(entry, options)
    if not proposer.tree_depth:
        raise NotDeclared("its drafts are chains (tree_depth is 0)")
    texts = _texts()
    for depth in range(proposer.tree_depth + 1):
        depths_R = np.array([max(0, depth - row % 2) for row in range(len(texts))])
        draft = _propose(proposer, replace(_view(texts), depths_R=depths_R))
        if draft.parents is None or [len(parents) for parents in draft.parents] != [len(ids) for ids in draft.token_ids]:
            raise CheckFailed("parents must have an entry for each draft of each row")
        for row, parents in enumerate(draft.parents):
            try:
                tree = Tree.of(parents)
            except ValueError as error:
                raise CheckFailed(f"row {row}: {error}") from None
            if tree.depth > depths_R[row]:
                raise CheckFailed(
                    f"row {row}: a tree of depth {tree.depth} where at most {depths_R[row]} is allowed (depths_R)"
                )
    if not any(parents and not Tree.of(parents).is_chain for parents in draft.parents):
        raise CheckFailed("no row's drafts branch: leave tree_depth 0 for chains")


def _proposer(entry: Entry, options: Any) -> Proposer:
    if is_bound(entry.load()):
        raise NotDeclared("it drafts only beside its target, where the engine holds it to this in every step")
    proposer = entry.load()(options)
    if type(proposer.num_drafts) is not int or proposer.num_drafts < 0:
        raise CheckFailed(f"num_drafts must be a whole number from 0, got {proposer.num_drafts!r}")
    return proposer


def _propose(proposer: Proposer, view: ProposeView) -> Draft:
    """The draft for rows that begin with the view's texts as their prompts, and end after it."""
    if proposer.tree_depth and view.depths_R is None:
        view = replace(view, depths_R=np.full(len(view.rows_R), proposer.tree_depth))
    texts = [view.tokens_RC[row, :length] for row, length in zip(view.rows_R, view.lengths_R, strict=True)]
    for row, text in zip(view.rows_R.tolist(), texts, strict=True):
        proposer.start(row, NewRow(f"of row {row}", text.tolist(), len(text), SamplingParams(), 0, frozenset(), [], 0))
    draft = proposer.propose(view)
    for row, text in zip(view.rows_R.tolist(), texts, strict=True):
        proposer.end(row, text)
    return draft


def _drafts(proposer: Proposer, view: ProposeView) -> list[list[int]]:
    """The drafts for a view, after the checks of form that hold for every one."""
    draft = _propose(proposer, view)
    if not isinstance(draft, Draft):
        raise CheckFailed(f"propose returned {type(draft).__name__}, not a Draft")
    if len(draft.token_ids) != len(view.rows_R):
        raise CheckFailed(f"{len(draft.token_ids)} lists of drafts for {len(view.rows_R)} rows")
    for row, (token_ids, limit) in enumerate(zip(draft.token_ids, view.limits_R.tolist(), strict=True)):
        if len(token_ids) > limit:
            raise CheckFailed(f"row {row}: {len(token_ids)} drafts where at most {limit} are allowed (limits_R)")
        if len(token_ids) > proposer.num_drafts:
            raise CheckFailed(f"row {row}: {len(token_ids)} drafts, more than its num_drafts of {proposer.num_drafts}")
    return draft.token_ids


def _texts() -> list[list[int]]:
    """Texts of many kinds: random, repeating with short and long periods, constant, a single token."""
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 2, 3, 17, 400)]
    texts += [
        (rng.integers(0, VOCAB_SIZE, period).tolist() * 200)[:length] for period, length in ((2, 50), (7, 100), (60, 301))
    ]
    texts += [rng.integers(0, 3, 200).tolist(), [4] * 64, [VOCAB_SIZE - 1], list(range(VOCAB_SIZE))]
    return texts


def _view(texts: list[list[int]], limits: list[int] | None = None, backwards: bool = False) -> ProposeView:
    """Rows that hold these texts, among rows that no one asked about; limits default to more than is ever proposed."""
    longest = max((len(text) for text in texts), default=0)
    places = np.arange(1, 2 * len(texts), 2)  # every other row
    if backwards:
        places = places[::-1].copy()
    tokens_RC = np.full((2 * len(texts) + 1, longest + 64), UNWRITTEN, np.int32)
    for place, text in zip(places, texts, strict=True):
        tokens_RC[place, : len(text)] = text
    lengths_R = np.array([len(text) for text in texts], np.int64)
    limits_R = np.array([64] * len(texts) if limits is None else limits, np.int64)
    return ProposeView(tokens_RC, places, lengths_R, limits_R)
