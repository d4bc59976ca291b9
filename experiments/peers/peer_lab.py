"""lab itself, as `lab.LLM` with its defaults and the overrides it is given."""

from collections.abc import Sequence

from harness.protocol import Generated, Peer, Request, Start, serve


class Lab(Peer):
    PACKAGES = ("lab-bench", "torch")
    MODULES = ("torch", "lab.engine.llm", "lab.engine.build", "lab.config")
    SETTINGS = "LLM with its defaults"

    @staticmethod
    def environment(start: Start) -> dict[str, str]:
        # what lab keeps goes here; the checkpoint comes as a folder, so it is not looked for in the cache
        return {"XDG_CACHE_HOME": start.cache, "TORCHINDUCTOR_CACHE_DIR": f"{start.cache}/inductor"}

    def __init__(self, start: Start) -> None:
        from lab import LLM

        given = [f"num_threads={start.threads}", f"cache.memory_bytes={start.kv_bytes}", f"model.max_model_len={start.max_len}"]
        self._llm = LLM(start.model, overrides=[*given, *start.options])

    def generate(self, requests: Sequence[Request]) -> Generated:
        from lab import SamplingParams

        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        params = [SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True) for request in requests]
        outputs = self._llm.generate(prompts, params)
        token_ids = [output.outputs[0].token_ids for output in outputs]
        if len(requests) > 1:
            return Generated(token_ids)
        timeline = outputs[0].metrics
        steps = zip(timeline.token_times_s, timeline.token_counts, strict=True)
        return Generated(token_ids, [moment for moment, count in steps for _ in range(count)])


if __name__ == "__main__":
    serve(Lab)
