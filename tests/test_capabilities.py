"""What a plugin can serve, compared with what a run needs; and who is chosen."""

import pytest

from lab.capabilities import Capabilities, Needs, Verdict, choose, unmet
from lab.errors import UserError

LIMITED = Capabilities(
    devices={"cuda"},
    dtypes={"bfloat16"},
    kv_dtypes={"bfloat16"},
    head_dims={64, 128},
    block_multiple=16,
    features={"gqa"},
)


def test_no_limits_meet_every_need_but_a_feature():
    needs = Needs(device="cpu", dtype="float32", kv_dtype="int8", head_dim=80, block_size=7)
    assert unmet(Capabilities(), needs) == []
    assert unmet(Capabilities(), Needs(features=frozenset({"mla"}))) == ["it has no mla"]


def test_no_needs_are_met_by_every_plugin():
    assert unmet(LIMITED, Needs()) == []


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (Needs(device="cpu"), "device cpu (it runs on cuda)"),
        (Needs(dtype="float32"), "dtype float32 (it takes bfloat16)"),
        (Needs(kv_dtype="int8"), "KV dtype int8 (it takes bfloat16)"),
        (Needs(head_dim=72), "head dim 72 (it takes 64, 128)"),
        (Needs(block_size=8), "block size 8 (it takes multiples of 16)"),
        (Needs(features=frozenset({"softcap", "gqa"})), "it has no softcap"),
    ],
)
def test_each_unmet_need_is_a_reason(needs, reason):
    assert unmet(LIMITED, needs) == [reason]


def test_a_feature_that_no_run_asks_for_is_a_slip():
    with pytest.raises(ValueError, match="no feature named 'softcapp'. Did you mean 'softcap'"):
        Capabilities(features={"softcapp"})


def test_reasons_are_collected_not_only_the_first():
    assert len(unmet(LIMITED, Needs(device="cpu", dtype="float32", head_dim=72, features=frozenset({"a", "b"})))) == 5


def test_packages_and_api_version():
    assert unmet(Capabilities(packages=("json", "no_such_package")), Needs()) == ["package 'no_such_package' is not installed"]
    assert unmet(Capabilities(packages=("no_such.sub.module",)), Needs()) == ["package 'no_such.sub.module' is not installed"]
    (reason,) = unmet(Capabilities(api_version=99), Needs())
    assert "99" in reason and "this is version 1" in reason


def test_a_package_that_one_device_needs():
    limited = Capabilities(packages=("cuda:no_such_package",))
    assert unmet(limited, Needs(device="cuda")) == ["package 'no_such_package' is not installed"]
    assert unmet(limited, Needs(device="cpu")) == unmet(limited, Needs()) == []


VERDICTS = [Verdict("slow", (), 0), Verdict("fast", (), 10), Verdict("best", ("device cpu (it runs on cuda)",), 20)]


def test_auto_takes_the_usable_one_of_highest_priority():
    assert choose("attention", "auto", VERDICTS) == "fast"


def test_a_name_is_used_whatever_its_priority():
    assert choose("attention", "slow", VERDICTS) == "slow"


def test_a_name_that_cannot_serve_is_refused_with_reasons_and_who_can():
    with pytest.raises(UserError) as error:
        choose("attention", "best", VERDICTS)
    assert "'best' cannot serve this run: device cpu (it runs on cuda)." in str(error.value)
    assert "These can: slow, fast." in str(error.value)
    with pytest.raises(UserError, match=r"\(it runs on cuda\) \(with attention.part=other\)\.\n"):
        choose("attention", "best", VERDICTS, {"part": "other"})


def test_auto_with_nobody_usable_lists_every_reason():
    with pytest.raises(UserError, match=r"no attention plugin can serve this run:\n  best: device cpu"):
        choose("attention", "auto", VERDICTS[2:])


@pytest.mark.parametrize("wrong", [{"devices": "cpu"}, {"packages": "json"}, {"graph": "sometimes"}])
def test_a_declaration_that_means_something_else_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        Capabilities(**wrong)
