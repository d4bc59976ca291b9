"""What no engine can beat on this machine: the workloads' arithmetic and bytes over the measured limits of the device."""

from collections.abc import Sequence

from harness.protocol import Request
from lab.metrics.roofline import DeviceFacts, floors
from lab.model.config import ModelConfig


class WorkloadFloors:
    """The floors of one model in bfloat16. Times in seconds."""

    def __init__(self, config: ModelConfig, facts: DeviceFacts) -> None:
        self._floors = floors(config, "bfloat16", facts)
        self._head_flops = 2 * config.vocab_size * config.hidden_size  # needed for sampled tokens only

    @property
    def weights_bytes(self) -> int:
        return self._floors.weights_bytes

    def decode_step_s(self, num_prompt: int, num_output: int) -> float:
        """One stream's mean decode step: all weights and the keys and values so far are read for each token."""
        contexts = range(num_prompt + 1, num_prompt + num_output)
        return sum(self._floors.step_s(1, context) for context in contexts) / len(contexts)

    def first_token_s(self, num_prompt: int) -> float:
        """A prompt's prefill: its arithmetic, or one read of the weights where that takes longer."""
        return max(self._compute_s([(0, num_prompt)], 1), self._floors.step_s(1))

    def all_at_once_s(self, requests: Sequence[Request], num_shared: int = 0) -> float:
        """The arithmetic alone, a prefix of `num_shared` tokens that all begin with computed once."""
        spans = [(num_shared, len(request.prompt_ids) + request.num_output - 1) for request in requests]
        return self._compute_s([(0, num_shared), *spans], sum(request.num_output for request in requests))

    def _compute_s(self, spans: Sequence[tuple[int, int]], num_sampled: int) -> float:
        """Time to compute the tokens at the positions of each span [first, end), of which `num_sampled` need logits."""
        num_tokens = sum(end - first for first, end in spans)
        num_attended = sum((end * (end + 1) - first * (first + 1)) // 2 for first, end in spans)
        flops = num_tokens * (self._floors.flops_per_token - self._head_flops) + num_sampled * self._head_flops
        flops += num_attended * self._floors.attention_flops_per_context_token
        return flops / self._floors.peak_flops
