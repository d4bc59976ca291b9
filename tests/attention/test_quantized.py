"""Quantized caches: the format itself, and that the C++ of `flash` makes the same bytes as the reference."""

from dataclasses import replace

import pytest
import torch

from lab import registry
from lab.checks import CheckFailed
from lab.checks import attention as checks
from lab.checks.attention_trial import Case, Trial, compare, make_backend, spec_of
from plugins.attention._quantized import dequantize, quantize, scales_of
from tests.attention.test_flash import CPU, FLASH, LENGTHS, MIXED, options, watched  # noqa: F401 - fixtures

registry.discover()
EAGER = registry.get("attention", "eager")
FORMATS = (torch.int8, torch.float8_e4m3fn)
KINDS = ("token_head", "head")
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def awkward_rows() -> torch.Tensor:
    """Rows of 64 over many magnitudes: ordinary, with an outlier, tiny, huge, zero, and on the edges of rounding."""
    rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    rows[1, 3] = 300.0
    rows[2] *= 1e-30
    rows[3] *= 1e30
    rows[4] = 0.0
    rows[5] = torch.arange(64) + 0.5
    rows[5, 0] = 127.0
    rows[6] = torch.linspace(-448, 448, 64)
    rows[7] = torch.arange(64) * 2.0**-10
    rows[7, 0] = 448.0
    return rows


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_row_survives_within_half_a_step(dtype):
    x = awkward_rows()
    scales = scales_of(x, dtype)
    assert scales.dtype == torch.bfloat16 and (scales.float() * LARGEST[dtype] >= x.abs().amax(-1) * (1 - 1e-6)).all()
    assert (scales.float() <= (x.abs().amax(-1) / LARGEST[dtype] * (1 + 2**-7)).clamp(min=2.0**-126)).all()
    off = (dequantize(quantize(x, scales, dtype), scales) - x).abs()
    step = scales.float()[:, None]
    assert (off <= (step / 2 if dtype == torch.int8 else torch.maximum(x.abs() / 16, step * 2.0**-10)) * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_is_beyond_a_fixed_scale_is_clipped(dtype):
    found = quantize(torch.tensor([[1e6, -1e6, 1.0]]), torch.ones(1), dtype).float()
    assert found.tolist() == [[LARGEST[dtype], -LARGEST[dtype], 1.0]]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_flash_writes_what_the_reference_would(dtype, kind, source):
    x = awkward_rows().clamp(-6e4, 6e4).to(source)
    spec = replace(spec_of(Case((), 2, 1, dtype=source), CPU), kv_dtype=dtype, kv_scales=kind)
    backend = make_backend(FLASH, FLASH.options(), spec)
    kv = torch.zeros(backend.kv_shape(1, 16), dtype=dtype)
    fixed = torch.tensor([[0.31], [0.0123]])
    if kind == "head":
        backend.set_scales(kv, fixed)
    backend.write(x[:, None], x.flip(0)[:, None], kv, torch.arange(len(x)))
    rows_2BD = backend._rows(kv[:1])[0, 0, :, : len(x)]
    for half, wanted in enumerate((x, x.flip(0))):
        scales = scales_of(wanted, dtype) if kind == "token_head" else fixed[half]
        assert torch.equal(rows_2BD[half].view(torch.int8), quantize(wanted, scales, dtype).view(torch.int8))
        if kind == "token_head":
            assert torch.equal(backend._scales(kv, kv)[0, 0, half, : len(x)], scales)


@pytest.mark.parametrize("kv_dtype", FORMATS, ids=str)
class TestEveryInstructionSet:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_mixed_batch(self, options, kv_dtype, kind, dtype):  # noqa: F811
        case = Case(MIXED, dtype=dtype, kv_dtype=kv_dtype, kv_scales=kind)
        compare(FLASH, options, case)
        compare(FLASH, replace(options, num_splits=3), replace(case, num_padding=3))

    @pytest.mark.parametrize(
        ("heads", "head_dim", "block_size"),
        [((9, 3), 64, 7), ((8, 8), 8, 16), ((17, 1), 80, 24), ((8, 2), 128, 16)],
        ids=str,
    )
    def test_shapes(self, options, kv_dtype, heads, head_dim, block_size):  # noqa: F811
        rows = ((63, 1), (64, 1), (17, 40), (130, 4), (0, 1))
        case = Case(rows, *heads, head_dim, block_size, torch.bfloat16, kv_dtype=kv_dtype, kv_scales="token_head")
        compare(FLASH, options, case)
        compare(FLASH, options, replace(case, sliding_window=15, softcap=3.0))

    @pytest.mark.parametrize("kind", KINDS)
    def test_decodes_of_many_lengths(self, options, kv_dtype, kind):  # noqa: F811
        case = Case(LENGTHS, 9, 3, dtype=torch.bfloat16, kv_dtype=kv_dtype, kv_scales=kind)
        compare(FLASH, options, case)
        compare(FLASH, options, replace(case, rows=LENGTHS[::-1], sliding_window=140))

    def test_every_number_of_the_format(self, options, kv_dtype):  # noqa: F811
        """Attention of one token over itself gives its value back: all numbers but those of NaN and -128."""
        left_out = (0x80,) if kv_dtype == torch.int8 else (0x7F, 0xFF)
        codes = torch.tensor([code for code in range(256) if code not in left_out], dtype=torch.uint8)
        numbers = codes.view(kv_dtype).float()
        values = torch.zeros(256)
        values[: len(numbers)] = numbers
        spec = spec_of(Case((), 1, 1, 256, kv_dtype=kv_dtype, kv_scales="head"), CPU)
        backend = make_backend(FLASH, options, spec)
        trial = Trial(Case(((0, 1),), 1, 1, 256), CPU, seed=0)
        kv = torch.zeros(backend.kv_shape(trial.num_blocks, 16), dtype=kv_dtype)
        backend.set_scales(kv, torch.ones(2, 1))
        batch = trial.batch
        backend.write(values.view(1, 1, 256), values.view(1, 1, 256), kv, batch.slots_T)
        out = torch.full((1, 1, 256), float("nan"))
        backend.attend(torch.ones(1, 1, 256), kv, backend.plan(batch), out)
        assert torch.allclose(out.flatten(), values, rtol=1e-6, atol=0)


class TestPlantedFaults:
    """The contract's check sees what can go wrong with scales."""

    def fails(self, faulty):
        entry = type("Entry", (), {"name": "faulty", "capabilities": EAGER.capabilities, "load": staticmethod(lambda: faulty)})
        with pytest.raises(CheckFailed):
            checks.check_quantized_cache(entry, EAGER.options())

    def test_scales_of_the_neighbour(self):
        class Neighbour(EAGER.load()):
            def attend(self, q_TNH, kv, plan, out_TNH):
                if self.spec.kv_scales == "token_head":
                    kv = kv.clone()
                    kv[..., self._dim :] = kv[..., self._dim :].roll(1, dims=3)
                super().attend(q_TNH, kv, plan, out_TNH)

        self.fails(Neighbour)

    def test_fixed_scales_of_keys_for_values(self):
        class Swapped(EAGER.load()):
            def set_scales(self, kv, scales_2K):
                super().set_scales(kv, scales_2K.flip(0))

        self.fails(Swapped)

    def test_one_bit_less(self):
        class Coarse(EAGER.load()):
            def _stored(self, kv, x_2XKH):
                rows = super()._stored(kv, x_2XKH)
                codes = rows[..., : self.spec.head_dim].view(torch.int8)
                codes.copy_(codes & -4)
                return rows

        self.fails(Coarse)
