"""Which requests can be served at all, and when a request ends."""

from collections.abc import Sequence

from lab.errors import UserError
from lab.kv.blocks import BlockManager
from lab.settings import SchedulerSettings
from lab.types import FinishReason, Request


def max_len(request: Request, max_model_len: int) -> int:
    """Tokens in all, prompt included, at which the request ends with the reason `length`.

    A prompt with a max_tokens that goes past the context limit is served up to exactly `max_model_len` tokens.
    """
    max_tokens = request.params.max_tokens
    return max_model_len if max_tokens is None else min(request.num_prompt + max_tokens, max_model_len)


def reach(settings: SchedulerSettings, num_drafts: int) -> int:
    """The most positions from the first that a row's next step may begin at to the last that it may compute.

    A step that decodes may begin at the last token that is known, while one before it, of as many positions, is in flight.
    """
    chunk = settings.long_prefill_token_threshold or settings.max_num_batched_tokens
    return max(chunk, 2 * (1 + num_drafts))


def refuse_if_never_fits(request: Request, settings: SchedulerSettings, blocks: BlockManager, max_model_len: int) -> None:
    """Raise UserError, with the numbers, for a request that could never run to its end even with the machine to itself.

    The last token of a request is never computed, so one of `total` tokens needs room for `total - 1`. Drafts need no
    more: they are trimmed so that they never pass the request's end.
    """
    num_prompt, who = request.num_prompt, f"request {request.id}"
    if num_prompt == 0:
        raise UserError(f"{who}: the prompt has no tokens.")
    if num_prompt >= max_model_len:
        raise UserError(f"{who}: the prompt has {num_prompt} tokens; max_model_len {max_model_len} allows {max_model_len - 1}.")
    if not settings.enable_chunked_prefill and num_prompt > settings.max_num_batched_tokens:
        raise UserError(
            f"{who}: the prompt has {num_prompt} tokens and must be computed in one step of at most "
            f"scheduler.max_num_batched_tokens={settings.max_num_batched_tokens}; "
            "raise that or set scheduler.enable_chunked_prefill=true."
        )
    total = max_len(request, max_model_len)
    for num_tokens, what in (
        (num_prompt, f"the prompt of {num_prompt} tokens"),
        (total - 1, f"a total of {total} tokens"),
    ):
        needed = blocks.blocks_for(num_tokens)
        if needed > blocks.num_blocks:
            raise UserError(
                f"{who}: {what} needs {needed} blocks of {blocks.block_size}, the cache has {blocks.num_blocks}; "
                "shorten the prompt or max_tokens, or give the cache more memory."
            )


def cut_at_stop(request: Request, new_ids: Sequence[int]) -> tuple[int, FinishReason | None, int | None]:
    """How many of the new tokens the request takes before it ends.

    EOS and stop tokens end it once it has min_tokens, themselves counted; the length limit always does.

    Returns:
        The number of tokens to keep, the finish reason (None: it goes on), and the stop token id that ended it.
    """
    params, max_len = request.params, request.max_len
    length, may_stop_at = len(request.token_ids), len(request.prompt_ids) + params.min_tokens
    eos_ids = () if params.ignore_eos else request.eos_ids
    for num_kept, token in enumerate(new_ids, 1):
        length += 1
        if length >= may_stop_at:
            if token in eos_ids:
                return num_kept, FinishReason.STOP, None
            if token in params.stop_token_ids:
                return num_kept, FinishReason.STOP, token
        if length >= max_len:
            return num_kept, FinishReason.LENGTH, None
    return len(new_ids), None, None
