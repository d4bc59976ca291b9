"""The kernels of `flash`: every instruction set, and what the contract's checks do not ask of it."""

import itertools
from dataclasses import replace

import pytest
import torch

from lab import capabilities, native, registry
from lab.capabilities import Capabilities, Needs, unmet
from lab.checks import attention as checks
from lab.checks.attention_trial import Case, Trial, compare, make_backend, spec_of
from lab.engine.resolution import resolve
from lab.errors import UserError
from lab.settings import PluginChoice
from plugins.attention.flash import cpu
from tests.native.tiles import emulated_tiles

registry.discover()
FLASH = registry.get("attention", "flash")
ISAS = ("amx", "avx512_mixed", "avx512_bf16", "avx512", "avx2", "portable")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
DIMS = ", ".join(map(str, range(8, 257, 8)))
NEEDS = Needs(device="cpu", dtype="bfloat16", kv_dtype="bfloat16", head_dim=64, block_size=16, features=frozenset({"gqa"}))
MIXED = ((0, 33), (100, 1), (64, 20), (5, 1), (0, 1), (250, 6), (31, 3), (512, 1), (16, 300), (700, 129))
LENGTHS = tuple((length, 1) for length in range(0, 420, 13))  # which end in every group of a tile, decoded one after another


@pytest.fixture
def watched(monkeypatch):
    """Operators for every instruction set whose requests to memory are held against what is the call's: see cpu/watch.h.

    Where the processor has no matrix tiles they are emulated: see lab/tiles.h.
    """
    name, flags = "lab_flash_watched", (*cpu.EVERY_ISA[1], "-DFLASH_WATCHED", *emulated_tiles())
    monkeypatch.setattr(cpu, "EVERY_ISA", (name, flags))
    native.load(name, cpu.SOURCES, flags=flags)
    return getattr(torch.ops, name)


@pytest.fixture(params=ISAS)
def options(request, watched):
    """Options that force an instruction set of this machine, which may ask memory for nothing that is not the call's."""
    usable = watched.isas()
    assert usable[-1] == "portable"
    if request.param not in usable:
        pytest.skip(f"this machine has no {request.param}")
    asked_before, astray_before = watched.watched()
    yield FLASH.options(isa=request.param)
    asked, astray = watched.watched()
    assert asked > asked_before and astray == astray_before, f"{astray - astray_before} requests to memory went astray"


@pytest.fixture
def threads():
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestEveryInstructionSet:
    def test_mixed_batch(self, options, dtype):
        compare(FLASH, options, Case(MIXED, dtype=dtype))
        compare(FLASH, options, Case(MIXED[::-1], dtype=dtype, num_padding=3))

    def test_decodes_of_many_lengths(self, options, dtype):
        case = Case(LENGTHS, 9, 3, dtype=dtype)
        compare(FLASH, options, case)
        compare(FLASH, options, replace(case, rows=LENGTHS[::-1], sliding_window=140))

    @pytest.mark.parametrize("block_size", [1, 7, 24])
    def test_block_sizes(self, options, dtype, block_size):
        compare(FLASH, options, Case(((63, 1), (64, 1), (17, 40), (130, 4)), dtype=dtype, block_size=block_size))

    @pytest.mark.parametrize("heads", [(8, 8), (9, 3), (9, 1), (17, 1), (32, 2)], ids=str)
    def test_groups(self, options, dtype, heads):
        compare(FLASH, options, Case(((90, 1), (0, 21), (30, 3), (70, 17)), *heads, dtype=dtype))

    @pytest.mark.parametrize("head_dim", [8, 72, 256])
    def test_head_dims(self, options, dtype, head_dim):
        compare(FLASH, options, Case(((50, 1), (0, 21), (20, 18)), head_dim=head_dim, dtype=dtype))

    @pytest.mark.parametrize("window", [1, 15, 100])
    def test_sliding_window(self, options, dtype, window):
        rows = ((200, 1), (0, 90), (161, 40), (64, 2), (300, 17))
        compare(FLASH, options, Case(rows, dtype=dtype, sliding_window=window))
        compare(FLASH, replace(options, num_splits=3), Case(rows, dtype=dtype, sliding_window=window, softcap=3.0))

    @pytest.mark.parametrize("num_splits", [2, 1000])
    def test_split_keys(self, options, dtype, num_splits):
        compare(FLASH, replace(options, num_splits=num_splits), Case(MIXED, dtype=dtype))

    def test_extreme_scores(self, options, dtype):
        """Scores of tens of thousands, of both signs and in every order: one key takes all, nothing overflows."""
        for num_splits in (1, 4):
            trial = Trial(Case(((400, 1), (0, 150), (300, 5)), dtype=dtype), CPU, seed=1)
            trial.q_TNH *= 150
            trial.keys = [k * 100 for k in trial.keys]
            trial.run(make_backend(FLASH, replace(options, num_splits=num_splits), spec_of(trial.case, CPU)), None)

    def test_scores_that_only_rise_or_fall(self, options, dtype):
        """The running maximum moves at every tile, or never again after the first."""
        for towards in (1, -1):
            trial = Trial(Case(((500, 1), (0, 300), (290, 9)), dtype=dtype), CPU, seed=2)
            trial.q_TNH.fill_(1.0)
            for k in trial.keys:
                k.copy_((towards * torch.arange(len(k)) / 4).to(dtype)[:, None, None].expand_as(k))
            trial.run(make_backend(FLASH, options, spec_of(trial.case, CPU)), None)

    def test_sinks(self, options, dtype):
        """They count once, also of rows that are split or share a prefix, and where they lie in more than one block."""
        case = Case(((200, 1), (0, 40), (161, 9), (90, 2)), 9, 3, dtype=dtype, sinks=True, num_padding=2)
        for num_splits, cascade, prefixes in ((1, "never", ()), (3, "never", ()), (2, 1, (((0, 2, 3), 80),))):
            given = replace(options, num_splits=num_splits, cascade=cascade)
            compare(FLASH, given, replace(case, prefixes=prefixes), lse=True)
        for kv_scales in ("head", "token_head"):
            compare(FLASH, options, replace(case, kv_dtype=torch.int8, kv_scales=kv_scales))
        compare(FLASH, options, replace(case, num_heads=32, num_kv_heads=1, head_dim=32, block_size=1, num_padding=0))


MANY, FEW = ((0, 90), (70, 17)), ((40, 1), (90, 2), (30, 8))


@pytest.mark.parametrize(("rows", "invariant", "like"), [(MANY, False, "floats"), (FEW, False, "pairs"), (MANY, True, "pairs")])
def test_products_of_floats_are_for_many_query_vectors(watched, rows, invariant, like):
    """Where the processor makes them faster than those of bf16 pairs, and bits need not be the same for few."""
    if "avx512_mixed" not in watched.isas():
        pytest.skip("this machine has no avx512_mixed")
    trial = Trial(Case(rows, dtype=torch.bfloat16, batch_invariant=invariant), CPU, seed=1)
    backends = [make_backend(FLASH, FLASH.options(isa=f"avx512{k}"), spec_of(trial.case, CPU)) for k in ("_mixed", "_bf16", "")]
    mixed_TNH, pairs_TNH, floats_TNH = map(trial.outputs, backends)
    assert not torch.equal(pairs_TNH, floats_TNH)
    assert torch.equal(mixed_TNH, pairs_TNH if like == "pairs" else floats_TNH)


class TestBatchInvariance:
    """A token has its bits in items of any size: in the largest tiles, cut for threads, by itself."""

    ROWS = ((0, 560), (1030, 1), (700, 17), (480, 60))
    STEPS = (
        [[(row, *span)] for row, span in enumerate(ROWS)]
        + [[(3, 480 + i, 7), (2, 700, 17 - i // 10)] for i in range(0, 53, 7)]
        + [[(0, first, count)] for first, count in ((127, 1), (128, 2), (511, 1), (512, 1), (505, 40), (333, 100))]
    )
    CASES = (
        Case(ROWS, batch_invariant=True),
        Case(ROWS, 6, 2, 40, sliding_window=100, block_size=8, batch_invariant=True),
        Case(ROWS, 20, 1, 32, sliding_window=613, sinks=True, batch_invariant=True),
        Case(ROWS, kv_dtype=torch.int8, kv_scales="token_head", softcap=20.0, batch_invariant=True),
    )

    @pytest.mark.parametrize("rising", [False, True])
    @pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
    @pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
    def test_any_chunks(self, options, dtype, case, rising):
        """`rising`: scores grow so much from key to key that what is summed up must be scaled again and again."""
        trial = Trial(replace(case, dtype=dtype), CPU, seed=1)
        for k_SKH in trial.keys if rising else ():
            k_SKH *= torch.linspace(0.5, 25, len(k_SKH))[:, None, None].to(dtype)
        spec = spec_of(trial.case, CPU)
        together_TNH = trial.outputs(make_backend(FLASH, replace(options, num_splits=1), spec))
        assert together_TNH.isfinite().all()
        for chunks in self.STEPS:
            found_TNH = trial.of(chunks).outputs(make_backend(FLASH, options, spec))
            assert torch.equal(found_TNH, together_TNH[trial.places(chunks)]), chunks

    def test_it_is_right(self, options):
        for case, dtype in itertools.product(self.CASES, DTYPES):
            compare(FLASH, options, replace(case, dtype=dtype), lse=True)


class TestCascade:
    """Keys that rows share are attended to once. What the kernels make of them the shared checks judge."""

    def test_the_checks_with_every_prefix_shared(self, options):
        options = replace(options, cascade=1)
        for check in (checks.check_shared_prefixes, checks.check_quantized_cache, checks.check_lse):
            check(FLASH, options)
        checks.check_shared_prefixes(FLASH, replace(options, num_splits=3))

    def test_extreme_scores(self, options):
        """A part whose scores are far below the other's counts for nothing, and one far above for all."""
        prefixes = (((0, 1, 2), 256), ((0, 2), 288))
        trial = Trial(Case(((400, 1), (300, 5), (300, 40)), prefixes=prefixes), CPU, seed=1)
        trial.q_TNH *= 150
        trial.keys = [k * 100 for k in trial.keys]
        trial.run(make_backend(FLASH, replace(options, cascade=1), spec_of(trial.case, CPU)), None)

    @pytest.mark.parametrize("block_size", [1, 7, 24, 64])
    def test_block_sizes(self, options, block_size):
        """Shared keys end where a group of 16 keys does, in the middle of a block or not."""
        prefixes = (((0, 2, 3), 100), ((2, 3), 150))
        case = Case(((163, 1), (64, 1), (157, 40), (192, 4)), block_size=block_size, prefixes=prefixes)
        compare(FLASH, replace(options, cascade=1), case)

    @pytest.mark.parametrize("count", [2, 5])
    def test_any_number_of_threads(self, options, threads, count):
        threads(count)
        rows = ((2000, 1), (1030, 1), (1100, 30), (0, 20), (1024, 3), (1024, 300))
        for dtype in DTYPES:
            case = Case(rows, dtype=dtype, prefixes=(((0, 1, 2, 4, 5), 1024),))
            compare(FLASH, replace(options, cascade=1), case)

    @pytest.mark.parametrize(
        ("prefixes", "cascade", "spared"),
        [
            ((), 1, 0),
            ((((0, 1, 2, 3), 64),), 1, 3 * 64),
            ((((0, 1, 2, 3), 64),), 64, 3 * 64),
            ((((0, 1, 2, 3), 64),), 65, 0),
            ((((0, 1, 2, 3), 64),), "never", 0),
            ((((0, 3), 64), ((1, 2), 160)), 1, 64 + 160),
            ((((0, 1, 2, 3), 64), ((1, 2), 160)), 1, 3 * 64 + 96),
            ((((0, 1, 2, 3), 64), ((1, 2), 160)), 96, 160),  # the two share what is too little for the four, too
            ((((0, 1, 2, 3), 64), ((1, 2), 160)), 97, 160),
        ],
    )
    def test_shared_keys_are_read_once(self, prefixes, cascade, spared):
        rows = ((96, 1), (300, 1), (170, 4), (64, 20))
        all_keys = 2 * sum(before + count for before, count in rows)
        assert _keys_read(Case(rows, prefixes=prefixes), cascade=cascade) == all_keys - 2 * spared

    def test_only_keys_that_all_queries_see_are_shared(self, threads):
        """A row that writes to the blocks in this step shares them with nobody, and rows whose window ends within do not."""
        threads(1)  # for more, a long row's tokens may be in several items, each with keys of its own to read
        rows, prefixes = ((0, 64), (64, 1), (64, 1)), (((0, 1, 2), 64),)
        case = Case(rows, prefixes=prefixes)
        all_keys = 2 * (64 + 65 + 65)
        cases = [replace(case, sliding_window=window) for window in (None, 65, 64)]
        spared = {case.sliding_window: all_keys - _keys_read(case, cascade=1) for case in cases}
        assert spared == {None: 128, 65: 128, 64: 4}

    @pytest.mark.parametrize(
        ("num_rows", "tokens", "shared", "pays"),
        [
            (32, 1, 1024, True),
            (4, 1, 64, True),
            (2, 1, 64, False),
            (8, 4, 512, True),
            (2, 32, 1024, False),
            (32, 32, 256, False),
        ],
    )
    def test_auto_shares_where_it_pays(self, num_rows, tokens, shared, pays):
        """Decodes and drafts, and a prefix must be long before it helps chunks, whose work is not in reading keys."""
        case = Case(((shared, tokens),) * num_rows, 9, 3, prefixes=((tuple(range(num_rows)), shared),))
        assert (_keys_read(case) < _keys_read(case, cascade="never")) == pays

    def test_a_plan_serves_every_layer(self):
        """What counts the parts that are done is ready again after each."""
        case = Case(((256, 1), (256, 1), (300, 3)), prefixes=(((0, 1, 2), 256),))
        backend = make_backend(FLASH, FLASH.options(cascade=1), spec_of(case, CPU))
        trial = Trial(case, CPU, seed=0)
        plan = backend.plan(trial.batch)
        backend.plan = lambda batch: plan
        for _ in range(3):
            trial.run(backend, None)

    @pytest.mark.parametrize("cascade", ["often", "64", 0, -3])
    def test_what_the_option_takes(self, cascade):
        with pytest.raises(UserError, match=f"attention.cascade={cascade}: it takes auto, never, or a number of tokens"):
            make_backend(FLASH, FLASH.options(cascade=cascade), spec_of(Case(()), CPU))


def _keys_read(case, **options):
    """What the items of the case's plan read, in keys of one KV head."""
    backend = make_backend(FLASH, FLASH.options(**options), spec_of(case, CPU))
    plan = backend.plan(Trial(case, CPU, seed=0).batch)  # which has the library loaded
    return torch.ops.lab_flash.keys_read(plan.work)


def test_a_long_context(options):
    rows = ((20_000, 1), (9_999, 20), (3, 1))
    for num_splits in (0, 1, 7):
        compare(FLASH, replace(options, num_splits=num_splits), Case(rows, dtype=torch.bfloat16))
    compare(FLASH, options, Case(rows, sliding_window=1000))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_threads(options, threads, count):
    threads(count)
    for dtype in DTYPES:
        compare(FLASH, options, Case((*MIXED, (3000, 1)), dtype=dtype))


def test_decodes_do_not_depend_on_threads_nor_on_their_neighbours(options, threads):
    """Split as the user says, not as the threads need, a decode gives the same bits in any company."""
    options = replace(options, num_splits=2)
    wanted = {}
    for count in (1, 2, 3):
        threads(count)
        for rows in (((300, 1), (40, 1)), ((300, 1), (40, 1), (0, 70), (900, 1))):
            trial = Trial(Case(rows, dtype=torch.bfloat16), CPU, seed=3)
            trial.keys[:2], trial.values[:2], trial.q_TNH[:2] = _fixed_inputs()
            out = _outputs(trial, make_backend(FLASH, options, spec_of(trial.case, CPU)))[:2]
            assert torch.equal(out, wanted.setdefault("bits", out))


def _fixed_inputs():
    generator = torch.Generator().manual_seed(4)
    keys, values = ([torch.randn(n, 2, 64, generator=generator).bfloat16() for n in (301, 41)] for _ in range(2))
    return keys, values, torch.randn(2, 4, 64, generator=generator).bfloat16()


def _outputs(trial, backend):
    """What the backend gives for a trial; its run judges it too."""
    found = []
    attend = backend.attend
    backend.attend = lambda q, kv, plan, out: (attend(q, kv, plan, out), found.append(out))
    trial.run(backend, None)
    return found[0]


@pytest.mark.parametrize("seed", range(4))
def test_all_backends_agree_on_a_random_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda most: int(torch.randint(0, most, (), generator=generator))  # noqa: E731
    rows = tuple((draw(400), 1 + draw(60) * draw(2)) for _ in range(12))
    outputs = []
    for name in ("eager", "sdpa", "flash"):
        entry = registry.get("attention", name)
        trial = Trial(Case(rows, 9, 3), CPU, seed)
        outputs.append(_outputs(trial, make_backend(entry, entry.options(), spec_of(trial.case, CPU))))
    assert torch.allclose(outputs[0], outputs[1], atol=1e-5)
    assert torch.allclose(outputs[0], outputs[2], atol=1e-5)


def test_queries_keys_and_values_may_be_parts_of_one_tensor():
    """As they come out of a fused projection: rows are dense, tokens are not next to each other."""
    spec = spec_of(Case((), 4, 2, dtype=torch.bfloat16), CPU)
    backend = make_backend(FLASH, FLASH.options(), spec)
    batch = Trial(Case(((0, 40), (0, 1)), 4, 2), CPU, seed=0).batch
    qkv = torch.randn(41, 8, 64).bfloat16()
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    outputs = []
    for parts in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())):
        kv = torch.full(backend.kv_shape(16, 16), float("nan"), dtype=torch.bfloat16)
        backend.write(parts[1], parts[2], kv, batch.slots_T)
        outputs.append(torch.full((41, 4, 64), float("nan"), dtype=torch.bfloat16))
        backend.attend(parts[0], kv, backend.plan(batch), outputs[-1])
    assert outputs[0].isfinite().all() and torch.equal(*outputs)


def test_a_cache_of_another_dtype(options):
    """Float32 queries over a bf16 cache: the same as over what bf16 left of the keys and values."""
    case = Case(MIXED)
    batch = Trial(case, CPU, seed=0).batch
    q = torch.randn(batch.num_tokens, 4, 64)
    k, v = (torch.randn(batch.num_tokens, 2, 64) for _ in range(2))
    outputs = []
    for kv_dtype in (torch.bfloat16, torch.float32):
        backend = make_backend(FLASH, options, replace(spec_of(case, CPU), kv_dtype=kv_dtype))
        kv = torch.zeros(backend.kv_shape(int(batch.blocks_RM.max()) + 1, 16), dtype=kv_dtype)
        backend.write(k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype), kv, batch.slots_T)
        outputs.append(torch.empty_like(q))
        backend.attend(q, kv, backend.plan(batch), outputs[-1])
    assert torch.allclose(*outputs, atol=1e-5) and outputs[0].any()


def test_an_instruction_set_that_is_not_there(watched):
    with pytest.raises(
        UserError, match=r"attention.isa=avx1024: this machine has no such kernels.\nAvailable: auto, .*portable"
    ):
        make_backend(FLASH, FLASH.options(isa="avx1024"), spec_of(Case(()), CPU))


class TestChoice:
    def test_auto_takes_flash(self):
        found = resolve("attention", PluginChoice("auto"), NEEDS)
        assert found.entry.name == "flash" and "a higher priority" in found.record["passed_over"]["sdpa"][0]

    def test_without_a_compiler(self, monkeypatch):
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        found = resolve("attention", PluginChoice("auto"), NEEDS)
        assert found.entry.name == "sdpa" and "no C++ compiler was found" in found.record["passed_over"]["flash"][0]
        with pytest.raises(
            UserError,
            match=r"'flash' cannot serve this run: no C\+\+ compiler was found(.|\n)*These can: eager, flex, hybrid, sdpa",
        ):
            resolve("attention", PluginChoice("flash"), NEEDS)

    def test_its_limits(self):
        assert unmet(FLASH.capabilities, replace(NEEDS, head_dim=60)) == ["head dim 60 (it takes " + DIMS + ")"]
        assert unmet(FLASH.capabilities, replace(NEEDS, device="cuda")) == []
        assert FLASH.static_capabilities is not None  # known without importing torch

    def test_on_cuda(self, monkeypatch):
        """flash, and sdpa where Triton is missing; on the CPU nobody asks for it."""
        on_cuda = replace(NEEDS, device="cuda")
        assert resolve("attention", PluginChoice("auto"), on_cuda).entry.name == "flash"
        monkeypatch.setattr(capabilities, "_is_installed", lambda package: package != "triton")
        found = resolve("attention", PluginChoice("auto"), on_cuda)
        assert found.entry.name == "sdpa" and found.record["passed_over"]["flash"] == ["package 'triton' is not installed"]
        assert resolve("attention", PluginChoice("auto"), NEEDS).entry.name == "flash"


def test_an_unknown_tool_is_refused():
    with pytest.raises(ValueError, match="requires takes cxx; got fortran"):
        Capabilities(requires={"fortran"})
