"""AsyncLLM from end to end: streams, aborts, failures, slow readers, shutting down."""

import asyncio
import gc
import threading

import pytest

from lab import AsyncLLM, SamplingParams, UserError
from lab.engine.async_llm import EngineFailed
from tests.engine.models import count_alpha, open_async_llm, open_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
LONG = SamplingParams(temperature=0.0, max_tokens=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return count_alpha(tmp_path_factory.mktemp("count"))


@pytest.fixture
def llm(folder):
    before = set(threading.enumerate())
    with open_async_llm(folder) as llm:
        yield llm
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def collect(llm, prompt, params=GREEDY, request_id=None, **more):
    return [output async for output in llm.generate(prompt, params, request_id, **more)]


async def text_of(llm, prompt, params=GREEDY):
    return (await collect(llm, prompt, params))[-1].outputs[0].text


async def until_idle(llm):
    """Wait for the engine to give back all blocks, and return its counters."""
    while (metrics := await llm.metrics())["running"] or metrics["waiting"] or metrics["kv"]["used_blocks"]:
        await asyncio.sleep(0.001)
    return metrics


def test_a_cumulative_stream_grows_to_the_whole(llm):
    outputs = run(collect(llm, "ABC"))
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == "DEFGH"
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_the_deltas_join_to_the_whole_and_end_once(llm):
    outputs = run(collect(llm, "ABC", SamplingParams(temperature=0.0, max_tokens=50, logprobs=0), stream="delta"))
    parts = [output.outputs[0] for output in outputs]
    assert len(parts) > 3
    assert sum((part.token_ids for part in parts), []) == list(range(3, 53))
    assert "".join(part.text for part in parts)[:5] == "DEFGH"
    assert sum(len(part.logprobs) for part in parts) == 50
    assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]


def test_many_streams_run_at_once_and_each_gets_its_own(llm):
    async def all_at_once():
        prompts = [{"prompt_token_ids": [i]} for i in range(40)]
        outputs = await asyncio.gather(*(collect(llm, prompt) for prompt in prompts))
        return [output[-1].outputs[0].token_ids for output in outputs], await until_idle(llm)

    found, metrics = run(all_at_once())
    assert found == [[(i + k) % 64 for k in range(1, 6)] for i in range(40)]
    assert metrics["kv"]["peak_used_blocks"] > 1


def test_each_stream_gets_its_own_refusal_and_the_rest_run_on(llm):
    async def mixed():
        calls = [
            text_of(llm, "ABC"),
            text_of(llm, {"prompt_token_ids": [64]}),
            text_of(llm, {"prompt_token_ids": [1] * 300}),
            text_of(llm, "\ud800 lone"),
            text_of(llm, "xyz"),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    good, bad_id, too_long, no_text, other = run(mixed())
    assert (good, other) == ("DEFGH", "01234")
    assert isinstance(bad_id, UserError) and "token id 64" in str(bad_id)
    assert isinstance(too_long, UserError) and "300 tokens; the context limit is 256" in str(too_long)
    assert isinstance(no_text, UserError) and "the prompt is not text" in str(no_text)


def test_what_only_the_scheduler_can_refuse_reaches_its_stream(folder):
    async def refused():
        async with open_async_llm(folder, "cache.num_blocks=4", "cache.block_size=4") as llm:
            with pytest.raises(UserError, match="needs 5 blocks of 4, the cache has 4"):
                await text_of(llm, {"prompt_token_ids": [1] * 20})
            return await text_of(llm, "ABC")

    assert run(refused()) == "DEFGH"


def test_cancelling_the_reader_aborts_the_request(llm):
    async def cancel():
        begun = asyncio.Event()

        async def read():
            async for _ in llm.generate("ABC", LONG, "x"):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        metrics = await until_idle(llm)
        assert metrics["output_tokens"] < 200
        assert await text_of(llm, "ABC") == "DEFGH"
        await collect(llm, "ABC", GREEDY, "x")  # the id is free again

    run(cancel())


@pytest.mark.parametrize("how", ["aclose", "forgotten"])
def test_leaving_the_stream_aborts_the_request(llm, how):
    async def leave():
        generator = llm.generate("ABC", LONG)
        await anext(generator)
        if how == "aclose":
            await generator.aclose()
        del generator
        gc.collect()
        metrics = await until_idle(llm)
        assert metrics["output_tokens"] < 200

    run(leave())


def test_a_request_cancelled_before_the_engine_saw_it_never_runs(llm):
    async def cancel_at_once():
        task = asyncio.create_task(collect(llm, "ABC", LONG))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await until_idle(llm)

    assert run(cancel_at_once())["output_tokens"] < 200


def test_abort_by_id_ends_the_stream_with_its_reason(llm):
    async def abort():
        last = None
        async for output in llm.generate("ABC", LONG, "x"):
            last = output
            llm.abort("x")
        llm.abort("x")
        llm.abort("never heard of")
        await until_idle(llm)
        return last

    last = run(abort())
    assert last.finished and last.outputs[0].finish_reason == "abort"
    assert 0 < len(last.outputs[0].token_ids) < 200


def test_an_id_in_use_is_refused(llm):
    async def twice():
        generator = llm.generate("ABC", LONG, "x")
        await anext(generator)
        with pytest.raises(UserError, match="request id 'x'"):
            await collect(llm, "ABC", GREEDY, "x")
        await generator.aclose()

    run(twice())


def test_a_slow_reader_gets_all_in_few_pieces_and_holds_nobody_up(llm):
    async def slow_and_fast():
        slow = llm.generate("ABC", SamplingParams(temperature=0.0, max_tokens=60), stream="delta")
        parts = [await anext(slow)]
        while (await llm.metrics())["running"]:
            await text_of(llm, "ABC")
        parts += [part async for part in slow]
        return parts

    parts = run(slow_and_fast())
    assert len(parts) == 2
    assert sum((part.outputs[0].token_ids for part in parts), []) == [i % 64 for i in range(3, 63)]


def test_several_samples_stream_side_by_side(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=8)
    outputs = run(collect(llm, "ABC", params, stream="delta"))
    ends = [part.index for output in outputs for part in output.outputs if part.finish_reason]
    assert sorted(ends) == [0, 1, 2]
    joined = {i: sum((p.token_ids for o in outputs for p in o.outputs if p.index == i), []) for i in range(3)}
    assert all(len(ids) == 8 for ids in joined.values())


def test_the_streams_equal_what_llm_gives(folder, llm):
    prompts = ["ABC", "x", {"prompt_token_ids": [9, 8, 7]}]
    params = SamplingParams(seed=5, max_tokens=20, logprobs=2)
    with open_llm(folder) as offline:
        expected = [output.outputs[0] for output in offline.generate(prompts, params)]

    async def streams():
        return await asyncio.gather(*(collect(llm, prompt, params) for prompt in prompts))

    found = [outputs[-1].outputs[0] for outputs in run(streams())]
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert [o.text for o in found] == [o.text for o in expected]


def test_a_fault_of_the_engine_reaches_all_and_later_calls_are_refused(folder):
    async def fault():
        llm = open_async_llm(folder)

        def break_it(record):
            raise ZeroDivisionError("planted")

        first = llm.generate("ABC", LONG)
        await anext(first)
        second = asyncio.create_task(collect(llm, "x", LONG))
        await asyncio.sleep(0.01)
        llm._loop.stack.engine.on_step = break_it
        with pytest.raises(EngineFailed, match="ZeroDivisionError: planted"):
            async for _ in first:
                pass
        with pytest.raises(EngineFailed, match="planted"):
            await second
        with pytest.raises(EngineFailed, match="planted") as caught:
            await collect(llm, "ABC")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(EngineFailed, match="planted"):
            await llm.metrics()
        llm.close()

    run(fault())


def test_a_step_that_fails_ends_its_requests_and_the_engine_serves_on(folder):
    async def failing_step():
        async with open_async_llm(folder) as llm:
            executor = llm._loop.stack.engine._executor
            collect_result = executor.collect

            def fail_once():
                collect_result()
                executor.collect = collect_result
                raise MemoryError("planted")

            generator = llm.generate("ABC", LONG)
            await anext(generator)
            executor.collect = fail_once
            outputs = [output async for output in generator]
            return outputs[-1], await text_of(llm, "ABC"), await until_idle(llm)

    last, text, metrics = run(failing_step())
    assert last.error == "MemoryError: planted"
    assert last.outputs[0].finish_reason == "error"
    assert text == "DEFGH" and metrics["num_failed"] == 1


def test_closing_ends_the_streams_and_refuses_the_next(folder):
    async def close():
        llm = open_async_llm(folder)
        generator = llm.generate("ABC", LONG)
        await anext(generator)
        await asyncio.to_thread(llm.close)
        rest = [output async for output in generator]
        assert rest[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(UserError, match="closed"):
            await collect(llm, "ABC")
        with pytest.raises(UserError, match="closed"):
            await llm.reset_prefix_cache()
        llm.close()

    before = set(threading.enumerate())
    run(close())
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


def test_an_event_loop_that_is_gone_does_not_stop_the_engine(llm):
    async def begin_and_leave():
        generator = llm.generate("ABC", LONG)
        await anext(generator)
        return generator

    loop = asyncio.new_event_loop()
    generator = loop.run_until_complete(begin_and_leave())
    loop.close()
    assert run(text_of(llm, "ABC")) == "DEFGH"
    assert run(until_idle(llm))["running"] == 0
    del generator


def test_the_prefix_cache_is_reset_between_two_steps(llm):
    async def reset():
        prompt = {"prompt_token_ids": list(range(20))}
        await collect(llm, prompt)
        warm = (await collect(llm, prompt))[-1].num_cached_tokens
        done = await llm.reset_prefix_cache()
        return warm, done, (await collect(llm, prompt))[-1].num_cached_tokens

    assert run(reset()) == (16, True, 0)


def test_it_is_made_from_ready_settings(folder, llm):
    with AsyncLLM.from_settings(llm.settings) as other:
        assert run(text_of(other, "ABC")) == "DEFGH"


def test_an_unknown_kind_of_stream_is_refused(llm):
    with pytest.raises(UserError, match="stream must be"):
        run(collect(llm, "ABC", stream="final"))
