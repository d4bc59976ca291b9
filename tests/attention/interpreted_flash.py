"""The Triton kernels of `flash` in Triton's interpreter, on the CPU: run by test_flash_triton.py in a process of its own.

Float32 and float16 alone: the interpreter computes wrongly in bfloat16.
"""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lab import registry
from lab.api import Attention
from lab.checks.attention import check_move
from lab.checks.attention_trial import TOLERANCE, Case, Trial, spec_of
from plugins.attention._quantized import quantize, scales_of
from plugins.attention.flash import Flash
from plugins.attention.flash.cuda import CudaKernels, Plan

assert os.environ.get("TRITON_INTERPRET") == "1", "run by tests/attention/test_flash_triton.py"
registry.discover()
torch.set_num_threads(1)
CPU = torch.device("cpu")
MIXED = ((0, 33), (70, 1), (34, 20), (5, 1), (0, 1), (31, 6))
DECODES = ((40, 1), (15, 1), (16, 1), (0, 1), (90, 1))
DTYPES = (torch.float32, torch.float16)


class Interpreted(Flash):
    """`flash` with its CUDA kernels, wherever the spec says that its tensors are."""

    def __init__(self, options, spec):
        Attention.__init__(self, options, spec)
        self._kernels = CudaKernels(options, spec)


def compare(
    case: Case, num_splits: int = 1, reuse_of: Case | None = None, *, cascade: int | str = "auto", lse: bool = False
) -> Plan:
    """Hold the kernels against the definition, in a shuffled pool whose unused slots are NaN. Returns the plan of the case."""
    backend = Interpreted(Flash.Options(num_splits=num_splits, cascade=cascade), spec_of(case, CPU))
    reuse = backend.plan(Trial(reuse_of, CPU, seed=5).batch) if reuse_of else None
    trial = Trial(case, CPU, seed=0)
    trial.run(backend, reuse, lse=lse)
    return reuse or backend.plan(trial.batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestEachDtype:
    def test_mixed_rows(self, dtype):
        plan = compare(Case(MIXED, dtype=dtype), num_splits=2)
        assert plan.tiles_X2 is not None and plan.decodes and plan.num_splits == 2

    def test_decodes(self, dtype):
        plan = compare(Case(DECODES, dtype=dtype))
        assert plan.tiles_X2 is None and plan.small_q == 1

    def test_prompts_around_the_edges_of_blocks(self, dtype):
        plan = compare(Case(((0, 15), (0, 16), (0, 17), (16, 33), (1, 65)), dtype=dtype))
        assert plan.tiles_X2 is not None and not plan.decodes

    def test_verification_of_drafts(self, dtype):
        plan = compare(Case(((40, 4), (16, 4), (0, 3), (77, 1)), dtype=dtype), num_splits=3)
        assert plan.tiles_X2 is None and plan.small_q == 4


@pytest.mark.parametrize("num_splits", [1, 2, 3, 4])
def test_splits(num_splits):
    """More splits than tiles of keys, too: empty ones must count for nothing."""
    case = Case(((200, 1), (3, 1), (129, 1)), num_padding=2)
    assert compare(case, num_splits).num_splits == num_splits


@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (9, 3), (8, 2), (5, 1), (7, 1), (9, 1), (17, 1)], ids=str)
def test_groups(heads):
    compare(Case(((40, 1), (0, 25), (17, 20), (3, 4)), *heads, head_dim=16), num_splits=2)


@pytest.mark.parametrize("head_dim", [8, 40, 80, 96, 128, 256])
def test_head_dims(head_dim):
    compare(Case(((50, 1), (0, 21), (20, 18)), head_dim=head_dim), num_splits=2)
    compare(Case(((50, 1), (20, 1)), head_dim=head_dim))


@pytest.mark.parametrize("block_size", [1, 7, 32])
def test_block_sizes(block_size):
    compare(Case(((63, 1), (32, 1), (17, 40)), block_size=block_size, head_dim=32), num_splits=2)


@pytest.mark.parametrize("window", [1, 50, 10_000])
def test_sliding_window(window):
    compare(Case(((90, 1), (0, 70), (60, 20)), sliding_window=window, head_dim=32))
    compare(Case(((150, 1), (10, 3)), sliding_window=window, head_dim=32), num_splits=3)


def test_softcap():
    compare(Case(((150, 1), (0, 40), (30, 20)), softcap=2.0, head_dim=32), num_splits=2)
    compare(Case(((150, 1), (7, 1)), softcap=2.0, head_dim=32))


@pytest.mark.parametrize("rows", [MIXED, DECODES, ((0, 30),), ((5, 1),)], ids=len)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_padding_tokens(rows, num_splits):
    compare(Case(rows, num_padding=11, head_dim=32), num_splits)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_padding_rows(num_splits):
    """As a captured graph has them: rows of no tokens and no context, and padding tokens behind the real ones."""
    for rows in (DECODES, MIXED[1:]):
        plan = compare(Case(rows, num_padding=3, num_padding_rows=4, head_dim=16), num_splits)
        assert plan.num_rows == len(rows) + 4


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("kv_scales", "dtype"), [("token_head", torch.float16), ("head", torch.float32)], ids=str)
def test_quantized_caches(kv_dtype, kv_scales, dtype):
    case = Case(((0, 18), (33, 1), (17, 19)), dtype=dtype, kv_dtype=kv_dtype, kv_scales=kv_scales, head_dim=40, num_padding=2)
    compare(case, num_splits=2)
    compare(replace(case, rows=((40, 1), (13, 1)), block_size=7))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_what_is_stored_is_what_the_reference_stores(kv_dtype):
    x = torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-4, 5)[:, None, None]
    spec = replace(spec_of(Case((), num_kv_heads=2), CPU), kv_dtype=kv_dtype, kv_scales="token_head")
    backend = Interpreted(Flash.Options(), spec)
    kv = torch.zeros(backend.kv_shape(1, 16), dtype=kv_dtype)
    backend.write(x, x.flip(0), kv, torch.arange(9))
    scales = scales_of(x, kv_dtype)
    assert torch.equal(backend._scales(kv, kv)[0, :, 0, :9], scales.T)
    found = backend._rows(kv)[0, :, 0, :9].transpose(0, 1)
    assert torch.equal(found.view(torch.int8), quantize(x, scales, kv_dtype).view(torch.int8))


def test_a_plan_serves_every_batch_of_its_shape():
    """A plan made for one long row, as graphs of mixed steps are captured with, then other rows of as many tokens."""
    one_row = Case(((0, 61), (3, 1), (0, 0)), head_dim=32)
    for rows in (((0, 20), (9, 41), (30, 1)), ((0, 60), (100, 1), (50, 1))):
        plan = compare(Case(rows, head_dim=32), num_splits=2, reuse_of=one_row)
        assert plan.decodes and plan.tiles_X2 is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_as_the_reference(dtype):
    case = Case(MIXED, dtype=dtype)
    outputs = []
    for backend in (Interpreted(Flash.Options(num_splits=2), spec_of(case, CPU)), eager(case)):
        trial = Trial(case, CPU, seed=3)
        kv = torch.zeros(backend.kv_shape(trial.num_blocks, case.block_size), dtype=dtype)
        blocks = torch.arange(trial.num_blocks)
        content = torch.randn(len(blocks), 16, 2, 2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        backend.load_blocks(kv, blocks, content)
        assert torch.equal(backend.export_blocks(kv, blocks), content)
        outputs.append(torch.full_like(trial.q_TNH, float("nan")))
        backend.attend(trial.q_TNH, kv, backend.plan(trial.batch), outputs[-1])
    assert (outputs[0] - outputs[1]).abs().max() <= TOLERANCE[dtype]


def eager(case):
    return registry.get("attention", "eager").load()(None, spec_of(case, CPU))


def test_strided_queries_keys_and_values():
    """The model gives slices of one projection."""
    case = Case(MIXED, num_heads=6, num_kv_heads=2, head_dim=32)
    trial = Trial(case, CPU, seed=0)
    backend = Interpreted(Flash.Options(num_splits=2), spec_of(case, CPU))
    fused = torch.randn(trial.batch.num_tokens, 10, 32, generator=torch.Generator().manual_seed(1))
    parts = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    outputs = []
    for q, k, v in (parts, [part.contiguous() for part in parts]):
        kv = torch.zeros(backend.kv_shape(trial.num_blocks, 16))
        backend.write(k, v, kv, trial.batch.slots_T)
        outputs.append(torch.empty(trial.batch.num_tokens, 6, 32))
        backend.attend(q, kv, backend.plan(trial.batch), outputs[-1])
    assert outputs[0].any() and torch.equal(*outputs)


@pytest.mark.parametrize("case", [{}, {"sliding_window": 30}, {"num_heads": 6, "num_kv_heads": 2, "head_dim": 40}], ids=str)
def test_a_batch_invariant_step_gives_a_token_its_bits_in_any_tile(case):
    rows = ((0, 90), (70, 1), (34, 20), (150, 1))
    trial = Trial(Case(rows, batch_invariant=True, **case), CPU, seed=0)
    backend = Interpreted(Flash.Options(), spec_of(trial.case, CPU))
    together_TNH = trial.outputs(backend)
    trial.run(backend, None)
    for chunks in ([(1, 70, 1)], [(2, 34, 20)], [(0, 0, 33), (2, 40, 3)], [(3, 150, 1), (0, 33, 57)], [(0, 89, 1)]):
        part = trial.of(chunks)
        plan = backend.plan(part.batch)
        assert not plan.decodes and plan.num_splits == 1
        assert torch.equal(part.outputs(backend), together_TNH[trial.places(chunks)]), chunks


WIDE = (-1, -1, -1, 0, 0, 1, 3, 3, 4, 7, 7, 2)
BUSH = tuple(-1 if node < 5 else node // 4 for node in range(40))


class TestTrees:
    """A node sees its own path among the drafts: in tiles of many tokens and in splits of the keys of few."""

    CASE = Case(
        ((40, 13), (0, 20), (31, 5), (70, 1), (15, 41)), head_dim=16, num_padding=2, trees=(WIDE, (), (-1, -1, 1), (), BUSH)
    )
    FEW = Case(((40, 3), (16, 3), (90, 3)), head_dim=16, trees=((-1, -1), (-1, 0), ()))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("num_splits", [1, 3])
    def test_mixed_rows(self, dtype, num_splits):
        plan = compare(replace(self.CASE, dtype=dtype), num_splits)
        assert plan.decodes and plan.tiles_X2 is not None
        plan = compare(replace(self.FEW, dtype=dtype), num_splits, lse=True)
        assert plan.decodes and plan.tiles_X2 is None

    def test_windows_go_by_depths(self):
        for window in (6, 20, 400):
            compare(replace(self.CASE, sliding_window=window), num_splits=2)
            compare(replace(self.FEW, sliding_window=window), num_splits=2)

    def test_quantized_and_capped(self):
        compare(replace(self.CASE, dtype=torch.float16, kv_dtype=torch.int8, kv_scales="token_head"), num_splits=2)
        compare(replace(self.CASE, softcap=2.0))

    def test_behind_shared_keys(self):
        plan = compare(replace(self.CASE, prefixes=(((0, 3), 32),)), cascade=1)
        assert plan.shared is not None

    def test_a_plan_serves_every_tree_of_its_shape(self):
        case = Case(((40, 13), (20, 13)), head_dim=16, trees=(WIDE, ()))
        compare(replace(case, rows=((9, 13), (70, 13)), trees=((), WIDE)), num_splits=2, reuse_of=case)

    def test_moves(self):
        entry = SimpleNamespace(name="flash", capabilities=Flash.capabilities, load=lambda: Interpreted)
        check_move(entry, Flash.Options())


@pytest.mark.parametrize("num_splits", [1, 2])
def test_logsumexp(num_splits):
    case = Case(((0, 18), (40, 1), (9, 2)), 2, 1, head_dim=16, num_padding=2)
    compare(case, num_splits, lse=True)
    compare(replace(case, rows=((40, 1), (9, 1)), sliding_window=20, softcap=3.0), num_splits, lse=True)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_sinks(num_splits):
    """They count once, in whichever kernel and split, and in the logsumexp by which parts of shared prefixes are merged."""
    case = Case(((0, 18), (40, 1), (9, 2)), 6, 2, head_dim=16, num_padding=2, sinks=True)
    compare(case, num_splits, lse=True)
    compare(replace(case, rows=((90, 1), (9, 1)), sliding_window=20, softcap=3.0), num_splits, lse=True)
    compare(replace(case, kv_dtype=torch.int8, kv_scales="head", block_size=2), num_splits)
    compare(replace(TestCascade.CASE, sinks=True), num_splits, cascade=1, lse=True)


class TestCascade:
    """Keys that rows share are attended to once: groups of rows and groups within them, in any order."""

    ROWS = ((42, 1), (0, 5), (32, 1), (17, 2), (40, 18), (33, 1), (18, 3))
    CASE = Case(ROWS, 4, 1, head_dim=16, prefixes=(((0, 2, 4, 5), 32), ((3, 6), 16), ((0, 4), 40)), block_size=8, num_padding=2)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_mixed_rows(self, dtype):
        plan = compare(replace(self.CASE, dtype=dtype), num_splits=2, cascade=1)
        assert plan.decodes and plan.tiles_X2 is not None
        assert plan.shared.key_first_R.tolist() == [40, 0, 32, 16, 40, 32, 16] and plan.shared.num_slots == 21 + 5 + 19

    def test_logsumexp(self):
        compare(self.CASE, cascade=1, lse=True)

    @pytest.mark.parametrize(("tokens", "num_splits"), [(1, 1), (4, 3)])
    def test_decodes_and_drafts(self, tokens, num_splits):
        rows, prefixes = tuple((before, tokens) for before in (40, 66, 35, 70)), (((1, 3), 64), ((0, 2), 32))
        plan = compare(replace(self.CASE, rows=rows, prefixes=prefixes, softcap=2.0), num_splits, cascade=1)
        assert plan.tiles_X2 is None and plan.shared.key_first_R.tolist() == [32, 64, 32, 64]

    @pytest.mark.parametrize("heads", [(2, 2), (5, 1)], ids=str)
    def test_groups(self, heads):
        num_heads, num_kv_heads = heads
        compare(replace(self.CASE, num_heads=num_heads, num_kv_heads=num_kv_heads), cascade=1)

    @pytest.mark.parametrize(("kv_scales", "dtype"), [("token_head", torch.float16), ("head", torch.float32)], ids=str)
    def test_quantized_caches(self, kv_scales, dtype):
        compare(replace(self.CASE, dtype=dtype, kv_dtype=torch.int8, kv_scales=kv_scales, head_dim=24), cascade=1)

    def test_long_prefixes_are_cut_for_many_programs(self):
        case = replace(self.CASE, rows=((640, 1), (640, 1)), prefixes=(((0, 1), 640),))
        plan = plan_of(case, cascade=1)
        assert plan.shared.tiles_Y6[:, 1:3].tolist() == [[0, 256], [256, 512], [512, 640]]

    def test_when_nothing_is_shared(self):
        case = self.CASE
        assert plan_of(case, cascade=16).shared is not None
        assert plan_of(case, cascade="never").shared is None and plan_of(case, cascade=41).shared is None
        assert plan_of(case).shared is None, "auto: it does not pay"
        assert plan_of(replace(case, sliding_window=1000), cascade=1).shared is None
        assert plan_of(replace(case, prefixes=()), cascade=1).shared is None

    def test_auto_shares_where_much_is_spared(self):
        case = Case(((2048, 1),) * 4, 8, 8, 128, prefixes=(((0, 1, 2, 3), 2048),))
        assert plan_of(case).shared is not None

    def test_a_plan_that_is_filled_again_shares_nothing(self):
        """As those of captured graphs: they are made for rows that share nothing, and launch the same in every step."""
        case = replace(self.CASE, rows=((40, 1), (64, 1)), prefixes=())
        assert compare(replace(case, prefixes=(((0, 1), 32),)), reuse_of=case, cascade=1).shared is None


def plan_of(case, **options):
    return Interpreted(Flash.Options(**options), spec_of(case, CPU)).plan(Trial(case, CPU, seed=0).batch)
