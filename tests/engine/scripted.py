"""A stand-in for the engine core: it holds requests and remembers what it was told; the test writes its updates."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from lab.engine.detokenizer import Vocabulary
from lab.engine.frontend import Frontend
from lab.engine.output import OutputProcessor
from lab.errors import UserError
from lab.types import FinishReason, Request


class ScriptedEngine:
    def __init__(self, vocab_size: int = 64, max_model_len: int = 100, eos_ids: frozenset[int] = frozenset()) -> None:
        self.model_config = SimpleNamespace(vocab_size=vocab_size, eos_ids=eos_ids)
        self.max_model_len = max_model_len
        self.now_s = 0.0
        self.requests: dict[str, Request] = {}
        self.finished: list[tuple[str, FinishReason, int | str | None]] = []
        self.refused_id: str | None = None  # the request that `add` refuses

    def clock(self) -> float:
        return self.now_s

    def add(self, request: Request) -> None:
        if request.id == self.refused_id:
            raise UserError("it can never fit")
        self.requests[request.id] = request

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        self.finished.append((request_id, reason, stop_reason))
        return self.requests.pop(request_id, None) is not None


@dataclass
class Rig:
    """A front over a scripted engine."""

    tokenizer: object
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)

    def __post_init__(self) -> None:
        self.frontend = Frontend(self.engine, self.tokenizer)
        vocabulary = Vocabulary(self.tokenizer) if self.tokenizer is not None else None
        self.outputs = OutputProcessor(self.engine, vocabulary)

    def submit(self, prompt, params=None, **more):
        return self.outputs.submit(self.frontend.prepare(prompt, params, **more))
