"""Known outputs as drafts: from a run's own requests.jsonl, by prompt, by the one token that is allowed, as right as asked."""

import json

import pytest

from lab import SamplingParams
from lab.api import UserError
from tests.engine.models import count_alpha, open_llm
from tests.spec.proposing import Rig, make


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_outputs_are_found_by_prompt_and_by_id(tmp_path):
    path = write(
        tmp_path / "known.jsonl",
        {"prompt_token_ids": [1, 2], "output_token_ids": [3, 4, 5, 6]},
        {"id": "7", "index": 0, "output_token_ids": [10, 11, 12]},
        {"id": "7", "index": 1, "output_token_ids": [20, 21, 22]},
    )
    rig = Rig(make("replay", path=path, num_drafts=2))
    rig.start(0, [1, 2], request_id="any")
    assert rig.propose(0) == [3, 4]
    rig.add(0, 3)
    assert rig.propose(0) == [4, 5] and rig.propose(0, limit=1) == [4] and rig.propose(0, limit=0) == []
    rig.add(0, 4, 5, 6)
    assert rig.propose(0) == []  # the file ends there
    for request_id, wanted in (("7", [10, 11]), ("7-0", [10, 11]), ("7-1", [20, 21])):
        rig.start(1, [9], request_id=request_id)
        assert rig.propose(1) == wanted
    rig.start(2, [9], output=[20, 21], request_id="7-1")  # resumed
    assert rig.propose(2) == [22]


def test_what_is_not_known_or_goes_another_way_gets_none_and_is_told(tmp_path, caplog):
    path = write(tmp_path / "known.jsonl", {"prompt_token_ids": [1, 2], "output_token_ids": [3, 4, 5, 6]})
    rig = Rig(make("replay", path=path))
    rig.start(0, [1], request_id="x")
    assert rig.propose(0) == []
    rig.start(1, [1, 2], request_id="y")
    rig.add(1, 3, 9)
    assert rig.propose(1) == rig.propose(1) == []
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "request x is not in" in told[0] and "request y went another way" in told[1]


def test_drafts_are_right_as_often_as_is_asked():
    rig = Rig(make("replay", acceptance=[0.9, 0.5], num_drafts=3), capacity=3000)
    rig.start(0, [1], allowed_token_ids=[7])
    accepted = []
    for _ in range(2500):
        drafts = rig.propose(0)
        assert len(drafts) == 3 and set(drafts) <= {6, 7}
        accepted.append(next((i for i, token in enumerate(drafts) if token != 7), 3))
        assert all(token == 6 for token in drafts[accepted[-1] :])
        rig.add(0, 7)
    first, second, third = (sum(count > i for count in accepted) for i in range(3))
    assert abs(first / 2500 - 0.9) < 0.03
    assert abs(second / first - 0.5) < 0.05 and abs(third / second - 0.5) < 0.07
    again = Rig(make("replay", acceptance=[0.9, 0.5], num_drafts=3))
    again.start(0, [1], allowed_token_ids=[7])
    other = Rig(make("replay", acceptance=[0.9, 0.5], num_drafts=3, seed=1))
    other.start(0, [1], allowed_token_ids=[7])

    def run(rig):
        found = []
        for _ in range(40):
            found.append(rig.propose(0))
            rig.add(0, 7)
        return found

    first_run, other_run = run(again), run(other)
    lengths = [next((i for i, token in enumerate(drafts) if token != 7), 3) for drafts in first_run]
    assert lengths == accepted[:40] and other_run != first_run


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_a_run_replayed_accepts_everything(tmp_path, is_async):
    folder = count_alpha(tmp_path / "count")
    prompts = ["ABC", "HIJ", "xyz"]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=13)
    with open_llm(folder) as llm:
        plain = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    lines = [{"id": str(number), "output_token_ids": token_ids} for number, token_ids in enumerate(plain)]
    path = write(tmp_path / "known.jsonl", *lines)
    overrides = ["+spec=replay", f"spec.path={path}", "spec.num_drafts=3", f"scheduler.async_scheduling={is_async}"]
    with open_llm(folder, *overrides) as llm:
        outs = [out.outputs[0] for out in llm.generate(prompts, params)]
        metrics = llm.metrics()
    assert [out.token_ids for out in outs] == plain
    assert metrics["accepted_tokens"] == metrics["draft_tokens"] > 0
    assert [out.timeline.token_counts for out in outs] == [[1, 4, 4, 4]] * 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no outputs"),
        ("not json\n", "line 1: not JSON"),
        ('{"id": "0", "output_token_ids": [1]}\n[1]\n', "line 2: must be an object with output_token_ids"),
        ('{"output_token_ids": [1]}\n', "line 1: must be an object with output_token_ids, and id or prompt_token_ids"),
        ('{"id": "0"}\n', "line 1: must be an object with output_token_ids"),
        ('{"id": 0, "output_token_ids": [1]}\n', "line 1: id must be text"),
        ('{"id": "0", "output_token_ids": [1, -2]}\n', "line 1: output_token_ids must be a list of token ids"),
        ('{"prompt_token_ids": "abc", "output_token_ids": [1]}\n', "line 1: prompt_token_ids must be a list of token ids"),
        ('{"id": "0", "output_token_ids": [1], "acceptance": [2]}\n', "line 1: acceptance must be a list of probabilities"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (None, "cannot read"),
    ],
)
def test_a_bad_file_is_one_clear_message(tmp_path, text, told):
    path = tmp_path / "known.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=told) as error:
        make("replay", path=str(path))
    assert str(path) in str(error.value) and str(error.value).count("\n") == 0


@pytest.mark.parametrize(("name", "value"), [("num_drafts", 0), ("acceptance", []), ("acceptance", [1.5])])
def test_bad_options_are_refused_by_name(name, value):
    with pytest.raises(UserError, match=rf"spec\.{name}"):
        make("replay", **{name: value})
