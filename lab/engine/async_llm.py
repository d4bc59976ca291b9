"""AsyncLLM: many streams at once over one engine, which steps in a thread of its own."""

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

from lab.engine.frontend import Prompt, Submission
from lab.engine.generation import Generation
from lab.engine.opened import Opened
from lab.engine.request_output import RequestOutput
from lab.engine.stack import Stack, engine_metrics
from lab.errors import UserError
from lab.sampling_params import SamplingParams
from lab.settings import Settings


class EngineFailed(RuntimeError):
    """The engine's thread ended by a fault of ours, which is the cause; no request can be served any more."""


class AsyncLLM(Opened):
    """A model that serves many requests at once from asyncio; also a context manager, with `with` and `async with`.

        async with AsyncLLM("smollm2") as llm:
            async for out in llm.generate("The capital of France is", SamplingParams(max_tokens=16), stream="delta"):
                print(out.outputs[0].text, end="")

    Its engine steps in a thread of its own.
    """

    def _start(self, stack: Stack) -> None:
        self._loop = _EngineLoop(stack)

    @classmethod
    def from_settings(cls, settings: Settings) -> "AsyncLLM":
        return cls(settings=settings)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @property
    def _open_stack(self) -> Stack:
        return self._loop.stack

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        stream: Literal["cumulative", "delta"] = "cumulative",
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of one prompt; the last one is `finished`.

        Cancelling the task, or closing the generator, aborts the request. A reader slower than the engine gets fewer and
        larger pieces.

        Args:
            prompt: a string, or a mapping as `Frontend` takes it.
            request_id: to `abort` it by; by default a number.
            stream: each output holds everything so far, or only what is new since the one before.

        Raises:
            UserError: the prompt or a parameter is wrong.
            EngineFailed: the engine is gone.
        """
        if stream not in ("cumulative", "delta"):
            raise UserError(f"stream must be 'cumulative' or 'delta', got {stream!r}.")
        reader = self._loop.open(prompt, sampling_params, request_id)
        try:
            finished = False
            while not finished:
                await reader.news.wait()
                reader.news.clear()
                output = self._loop.take(reader, stream)
                if output is not None:
                    finished = output.finished
                    yield output
        finally:
            self._loop.abandon(reader)

    def abort(self, request_id: str) -> None:
        """End a request: its stream ends with the finish_reason `abort`. One that is over, or unknown, is left alone."""
        self._loop.abort(request_id)

    async def metrics(self) -> dict[str, Any]:
        """Counters of the engine since its start: requests, tokens, preemptions, prefix cache, KV blocks."""
        return await asyncio.wrap_future(self._loop.call(engine_metrics))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing changed, while requests hold blocks."""
        return await asyncio.wrap_future(self._loop.call(lambda stack: stack.engine.reset_prefix_cache()))

    def close(self) -> None:
        """Abort what runs, end the engine's thread and give the model's memory back. More than once does no harm."""
        self._loop.close()


class _Reader:
    """One stream: where its news is announced, and what is to be read."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.generation: Generation | None = None  # once the engine has taken it
        self.error: Exception | None = None  # that keeps it from going on
        self.is_over = False
        self.news = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()

    def announce(self) -> bool:
        """Wake the reader, from any thread. False when its event loop is gone."""
        try:
            self._event_loop.call_soon_threadsafe(self.news.set)
        except RuntimeError:  # closed
            return False
        return True


class _EngineLoop:
    """The engine's thread, and what other threads may ask of it.

    Only this thread touches the engine. Others leave commands; `_lock` guards those and all state of the generations, and
    is not held while the engine steps. `_front_lock` guards the front, so that a long prompt keeps no step waiting.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._lock = threading.Condition()
        self._front_lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._readers: dict[str, _Reader] = {}  # all streams that are not over, by the user's request id
        self._calls: set[Future[Any]] = set()  # not answered yet
        self._failure: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="lab-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside torch must not outlive the interpreter

    def open(self, prompt: Prompt, params: SamplingParams | None, request_id: str | None) -> _Reader:
        """Check a prompt and queue it. Raises UserError, EngineFailed."""
        with self._front_lock:
            submission = self.stack.frontend.prepare(prompt, params, request_id=request_id)
        with self._lock:
            self._refuse_if_down()
            if submission.id in self._readers:
                raise UserError(f"request id '{submission.id}' belongs to a request that has not finished: give another one.")
            reader = self._readers[submission.id] = _Reader(submission)
            self._command(lambda: self._submit(reader))
            return reader

    def take(self, reader: _Reader, stream: str) -> RequestOutput | None:
        """What the reader has not seen, None when there is nothing. Raises the error that ended the stream."""
        with self._lock:
            if reader.error is not None:
                reader.is_over = True
                raise reader.error
            if reader.generation is None:
                return None
            news = reader.generation.delta()
            if news is None:
                return None
            reader.is_over = news.finished
            return news if stream == "delta" else reader.generation.output()

    def abandon(self, reader: _Reader) -> None:
        """The reader is gone: end its request if that is not over."""
        with self._lock:
            if self._readers.get(reader.submission.id) is reader:
                del self._readers[reader.submission.id]
                if not reader.is_over:
                    self._command(lambda: self._end(reader))

    def abort(self, request_id: str) -> None:
        with self._lock:
            reader = self._readers.get(request_id)
            if reader is not None:
                self._command(lambda: self._end(reader))

    def call(self, function: Callable[[Stack], Any]) -> "Future[Any]":
        """Run a function between two steps. Raises EngineFailed."""
        future: Future[Any] = Future()
        with self._lock:
            self._refuse_if_down()
            self._calls.add(future)
            self._command(lambda: self._call(future, function))
        return future

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._lock.notify()
        self._thread.join()
        atexit.unregister(self.close)

    def _refuse_if_down(self) -> None:
        if self._failure is not None or self._is_closing:
            raise self._down()

    def _down(self) -> Exception:
        """Why nothing is served any more."""
        if self._failure is None:
            return UserError("this AsyncLLM is closed: make another one.")
        error = EngineFailed(f"the engine has failed: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error

    def _call(self, future: "Future[Any]", function: Callable[[Stack], Any]) -> None:
        if future.set_running_or_notify_cancel():
            future.set_result(function(self.stack))
        self._calls.discard(future)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._lock.notify()

    def _run(self) -> None:
        """The thread: commands, a step, news; asleep while there is neither."""
        with ExitStack() as ending:
            ending.push(self._ended)
            engine = self.stack.engine
            while True:
                with self._lock:
                    while not (self._commands or self._is_closing or engine.has_work):
                        self._lock.wait()
                    if self._is_closing:
                        return
                    while self._commands:
                        self._commands.popleft()()
                updates = engine.step()
                with self._lock:
                    for generation in self.stack.outputs.process(updates):
                        self._announce(generation)

    def _announce(self, generation: Generation) -> None:
        reader = self._readers.get(generation.id)
        if reader is not None and not reader.announce():
            del self._readers[generation.id]
            self.stack.outputs.abort(generation)

    def _submit(self, reader: _Reader) -> None:
        if self._readers.get(reader.submission.id) is not reader:
            return  # abandoned before its turn
        try:
            reader.generation = self.stack.outputs.submit(reader.submission)
        except UserError as error:
            reader.error = error
            reader.announce()

    def _end(self, reader: _Reader) -> None:
        if reader.generation is not None:
            self.stack.outputs.abort(reader.generation)
            reader.announce()

    def _ended(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> bool:
        """The thread ends, by `close` or by a fault: those who wait hear of it, and it is theirs to raise."""
        with self._lock:
            self._failure = failure
            for reader in self._readers.values():
                if failure is None and reader.generation is not None:
                    self.stack.outputs.abort(reader.generation)
                else:
                    reader.error = self._down()
                reader.announce()
            for future in self._calls:
                future.set_exception(self._down())
            self._calls.clear()
        if failure is None:
            self.stack.engine.close()
        return True
