"""The adapters of flash-attn and FlashInfer: what can be known without a GPU and without the packages.

Their calls are made to stand-ins written after the packages' documentation, which compute plainly: so the arguments, the
paging and the padding are judged by the contract's checks, and the packages' own kernels are not.
"""

import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from lab import registry
from lab.capabilities import Needs
from lab.checks import NotDeclared
from lab.checks import attention as checks
from lab.engine.resolution import resolve
from lab.errors import UserError
from lab.settings import PluginChoice
from tests.attention import stand_ins

registry.discover()
ADAPTERS = {"fa": "flash_attn", "flashinfer": "flashinfer"}  # and the packages
CHECKS = [function for name, function in vars(checks).items() if name.startswith("check_")]


@pytest.mark.parametrize(("name", "package"), ADAPTERS.items())
def test_without_the_package_it_is_refused_with_the_reason(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"'{name}' cannot serve this run: package '{package}' is not installed"):
        resolve("attention", PluginChoice(name), Needs(device="cuda", dtype="bfloat16", head_dim=64, block_size=256))


@pytest.mark.parametrize("name", ADAPTERS)
def test_limits_are_named(name):
    with pytest.raises(UserError) as caught:
        resolve("attention", PluginChoice(name), Needs(device="cpu", dtype="float32", head_dim=96, block_size=16))
    said = str(caught.value)
    assert "device cpu (it runs on cuda)" in said and "dtype float32 (it takes bfloat16, float16)" in said
    assert ("block size 16 (it takes multiples of 256)" in said) == (name == "fa")
    assert ("head dim 96 (it takes 64, 128, 256)" in said) == (name == "flashinfer")


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_calls_keep_the_contract(name, check, monkeypatch):
    monkeypatch.setitem(sys.modules, ADAPTERS[name], stand_ins)
    entry = registry.get("attention", name)
    on_cpu = replace(entry, static_capabilities=replace(entry.capabilities, devices={"cpu"}))
    with suppress(NotDeclared):
        check(on_cpu, entry.options())


def test_pages_of_a_block_table():
    from plugins.attention.flashinfer import pages

    table = np.array([[4, 2, 9], [7, 0, 0], [5, 3, 0]], np.int32)
    start, listed, last = pages(np.array([33, 16, 17], np.int32), table, 16)
    assert start.tolist() == [0, 3, 4, 6]
    assert listed.tolist() == [4, 2, 9, 7, 5, 3]
    assert last.tolist() == [1, 16, 1]  # a full block counts all its tokens, not none
