"""Tensors in huge pages are what they were, and live as long as somebody has them."""

import gc

import pytest
import torch

from lab.memory import CHUNK, HUGE_PAGE, LEAST, HugePages, huge_empty


def test_huge_memory_begins_on_a_huge_page_and_is_zero():
    memory = huge_empty(3 * HUGE_PAGE // 2)
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert len(memory) == 3 * HUGE_PAGE // 2
    assert not memory.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_held_tensors_keep_dtype_shape_and_values_beside_each_other(dtype):
    pages = HugePages()
    tensors = [torch.randint(-100, 100, (rows, 1000)).to(dtype) for rows in (70, 301, 130)]
    held = [pages.hold(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, held, strict=True):
        assert copy.data_ptr() != tensor.data_ptr()
        assert copy.data_ptr() % 64 == 0
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)


def test_a_tensor_over_the_chunk_gets_memory_of_its_own():
    pages = HugePages()
    small = pages.hold(torch.ones(LEAST))
    large = pages.hold(torch.full((CHUNK // 4 + 1000,), 2.0))
    assert small.sum() == LEAST
    assert large.sum() == 2.0 * (CHUNK // 4 + 1000)


def test_memory_outlives_the_holder():
    held = HugePages().hold(torch.arange(LEAST))
    gc.collect()
    junk = [huge_empty(HUGE_PAGE).fill_(7) for _ in range(8)]
    assert torch.equal(held, torch.arange(LEAST))
    assert len(junk) == 8


def test_small_and_strided_tensors_stay_where_they_are():
    pages = HugePages()
    small = torch.ones(8)
    strided = torch.ones(1000, 1000).t()
    assert pages.hold(small) is small
    assert pages.hold(strided) is strided
