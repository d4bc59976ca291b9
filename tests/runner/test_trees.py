"""Trees in a step: where nodes stand, what they see, and what becomes of the accepted path."""

import numpy as np
import pytest
import torch

from lab import registry
from lab.api import Draft
from lab.checks.attention_trial import Case, Trial, spec_of
from lab.errors import PluginFault
from lab.kv.store import KVStore
from lab.runner.batch import BatchBuilder, Share
from lab.runner.buffers import InputBuffers
from lab.runner.drafting import Drafting
from lab.runner.rows import Rows
from lab.runner.trees import PathMover, kept_tokens
from lab.sample.tree import Tree
from lab.types import Chunk
from tests.runner.test_batch import new_row
from tests.runner.test_drafting import VOCAB, Fixed, Scripted

CPU = torch.device("cpu")
registry.discover()
TREE = Tree.of([-1, -1, 0, 1, 2])


@pytest.fixture
def rows():
    """Rows of 6 and of 3 known tokens, in blocks of 4 in a wild order."""
    found = Rows(4, 40, 4)
    found.add(new_row("a", [1, 2, 3, 4, 5, 6], [7, 2, 5]))
    found.add(new_row("b", [8, 9, 10], [3]))
    return found


def test_nodes_lie_in_order_and_stand_by_their_depths(rows):
    a, b = rows["a"], rows["b"]
    rows.set_drafts(a, [11, 12, 13, 14, 15], TREE)
    assert rows.tree(a, 5) is TREE and rows.tree(a, 2) == Tree.of([-1, -1]) and rows.tree(b, 5) is None
    shares = [Share(b, 1, 2, 0, True), Share(a, 5, 6, 5, True, rows.tree(a, 5))]
    batch = BatchBuilder(rows, 4, CPU).build(shares)
    assert batch.input_ids_T.tolist() == [9, 10, 6, 11, 12, 13, 14, 15]
    assert batch.positions_T.tolist() == [1, 2, 5, 6, 6, 7, 7, 8]
    assert batch.slots_T.tolist() == [13, 14, 9, 10, 11, 20, 21, 22]
    assert batch.ctx_len_R.tolist() == [3, 11] and batch.trees.start_R.tolist() == [3, 6]
    assert batch.trees.ancestors_T.tolist() == [0, 0, 0, 0b1, 0b10, 0b101, 0b1010, 0b10101]
    assert batch.logits_idx_L.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert BatchBuilder(rows, 4, CPU).build([Share(b, 1, 2, 0, True)]).trees is None


def test_in_buffers_every_step_has_trees_so_that_one_graph_serves_all(rows):
    builder = BatchBuilder(rows, 4, CPU, InputBuffers(16, 4, 10, CPU), 40, has_trees=True)
    batch = builder.build([Share(rows["b"], 1, 2, 0, True)], 6, 3)
    assert batch.trees.start_R.tolist() == [3, 0, 0] and batch.trees.ancestors_T.tolist() == [0] * 6
    address = batch.trees.start_R.data_ptr(), batch.trees.ancestors_T.data_ptr()
    rows.set_drafts(rows["a"], [11, 12], Tree.of([-1, -1]))
    batch = builder.build([Share(rows["a"], 5, 3, 2, True, rows.tree(rows["a"], 2))], 6, 3)
    assert (batch.trees.start_R.data_ptr(), batch.trees.ancestors_T.data_ptr()) == address
    assert batch.trees.start_R.tolist() == [6, 0, 0] and batch.trees.ancestors_T.tolist() == [0, 1, 2, 0, 0, 0]
    assert builder.build_sample(6, 3, is_uniform=True).trees.ancestors_T.tolist() == [0] * 6


def test_a_tree_is_the_rows_own_until_it_is_used_up(rows):
    a = rows["a"]
    rows.set_drafts(a, [11, 12, 13], Tree.of([-1, -1, 1]))
    rows.apply(Chunk("a", 5, 3, 2, True, [], [11, 12]))  # as the scheduler cut it
    assert rows.num_drafts_R[a] == 2 and rows.tree(a, 2) == Tree.of([-1, -1])
    rows.append(a, [12, 20])
    assert rows.tree(a, 2) is None
    rows.set_drafts(a, [11, 12], Tree.of([-1, -1]))
    rows.set_drafts(a, [11, 12])
    assert rows.tree(a, 2) is None


def test_the_accepted_path_is_moved_in_every_layer(rows):
    spec = spec_of(Case((), num_heads=1, num_kv_heads=1, head_dim=8, block_size=4), CPU)
    backends = [registry.get("attention", name).load()(None, spec) for name in ("eager", "sdpa")]
    store = KVStore(backends, 9)
    for kv in store.layers:
        kv.flatten(1, 2)[:] = torch.arange(40.0)[None, :, None, None]
    shares = [Share(rows["b"], 1, 3, 1, True), Share(rows["a"], 5, 6, 5, True, TREE)]
    PathMover(rows, backends, (0, 0), 4).move(shares, {rows["a"]: [0, 2, 4]}, store)
    for kv in store.layers:
        found = kv.flatten(1, 2)[0, :, 0, 0].tolist()
        # positions 6, 7, 8 of row a are slots 10, 11, 20; nodes 0, 2, 4 were in slots 10, 20, 22
        assert [found[slot] for slot in (9, 10, 11, 20, 21, 22)] == [9, 10, 20, 22, 21, 22]
        assert [i for i, value in enumerate(found) if value != i] == [11, 20]


def test_a_step_is_shown_without_what_was_rejected():
    shares = [Share(3, 4, 2, 0, True), Share(0, 9, 6, 5, True, TREE), Share(1, 2, 4, 3, True), Share(2, 0, 3, 0, False)]
    kept, index = kept_tokens(shares, {0: [1, 3]}, [2, 3, 2, 3])
    assert [(share.row, share.start, share.num_tokens, share.num_drafts) for share in kept] == [
        (3, 4, 2, 0),
        (0, 9, 3, 0),
        (1, 2, 2, 0),
        (2, 0, 3, 0),
    ]
    assert index.tolist() == [0, 1, 2, 4, 6, 8, 9, 12, 13, 14]


class Branching(Fixed):
    """Proposes the tree that it is told to."""

    tree_depth = 2


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([[1, 2], []], parents=[[-1, -1]]), "parents for 1 rows of 2"),
        (Draft([[1, 2], []], parents=[[-1], []]), "1 parents for the 2 drafts of row 0"),
        (Draft([[1, 2], []], parents=[[-1, 1], []]), "row 0 of its view: node 1 has the parent 1"),
        (Draft([[1, 2, 3], []], parents=[[-1, 0, 1], []]), "a tree of depth 3 for row 0, which may be 2 deep"),
        (Draft([[], [1, 2]], parents=[[], [-1, 0]]), "a tree of depth 2 for row 1, which may be 1 deep"),
    ],
)
def test_a_broken_tree_names_the_plugin(rows, draft, message):
    drafting = Drafting(Branching(draft), rows, VOCAB)
    with pytest.raises(PluginFault, match=message) as error:
        drafting.propose([rows["a"], rows["b"]], np.array([20, 5]))
    assert "spec plugin 'fixed'" in str(error.value)


def test_trees_from_a_proposer_of_chains_are_refused(rows):
    drafting = Drafting(Fixed(Draft([[1, 2]], parents=[[-1, -1]])), rows, VOCAB)
    with pytest.raises(PluginFault, match="proposed a tree, and its tree_depth is 0"):
        drafting.propose([rows["a"]], np.array([20]))


def test_the_end_of_a_text_bounds_a_trees_depth_and_not_its_nodes(rows):
    class Noting(Branching):
        num_drafts = 7

        def propose(self, view):
            self.view = view
            return Draft([[] for _ in view.rows_R])

    proposer = Noting(None)
    Drafting(proposer, rows, VOCAB).propose([rows["a"], rows["b"], rows["b"]], np.array([20, 5, 4]))
    assert proposer.view.limits_R.tolist() == [7, 7, 0] and proposer.view.depths_R.tolist() == [2, 1, 0]


@pytest.mark.parametrize(("came", "accepted"), [(8, 1), (9, 0)])
def test_a_tree_is_tried_dry_by_its_first_level(rows, came, accepted):
    """Any of its nodes may be what comes; one alone would say less of a tree than the tree is worth."""

    class Wide(Branching):
        num_drafts = 5

        def propose(self, view):
            self.view = view
            return self.draft

    proposer, length = Wide(Draft([[5, 6, 8], []], parents=[[-1, -1, -1], []])), Scripted([0, 0], [True, False])
    drafting, ids = Drafting(proposer, rows, VOCAB, length), [rows["a"], rows["b"]]
    assert drafting.propose(ids, np.array([20, 20])) == {ids[0]: [], ids[1]: []}
    assert proposer.view.limits_R.tolist() == [3, 0] and proposer.view.depths_R[0] == 1
    drafting.observe([Share(ids[0], 2, 1, 0, True)], [[came]], 1.0)
    (step,) = length.seen
    assert (step.offered_R.tolist(), step.accepted_R.tolist(), step.num_asked) == ([1], [accepted], 0)


def test_the_definition_of_trees_agrees_with_chains_along_each_path():
    """The oracle of the checks: a node sees what it would see if its path were a chain."""
    parents = (-1, -1, 0, 2, 1, 2)
    tree = Tree.of(parents)
    trial = Trial(Case(((9, 7),), num_heads=2, num_kv_heads=2, trees=(parents,)), CPU, seed=1)
    found = trial._definition(trial.q_TNH, 0)
    for node in range(6):
        path = [i for i in range(6) if tree.ancestors[node] >> i & 1]
        index = [*range(10), *(10 + i for i in path)]
        q, k, v = (
            x[index].double()
            for x in (torch.cat([trial.q_TNH[:1].expand(9, -1, -1), trial.q_TNH]), trial.keys[0], trial.values[0])
        )
        scores = torch.einsum("nh,snh->ns", q[-1], k) * 64**-0.5
        assert torch.allclose(torch.einsum("ns,snh->nh", scores.softmax(-1), v), found[1 + node])
