"""Sources of small plugins, and a registry of a test's own to load them into."""

from pathlib import Path

POLICY = """
from lab.api import Policy, dataclass, register


@register("policy", "{name}")
class Mine(Policy):
    \"\"\"Serves the shortest prompt first.\"\"\"

    @dataclass(frozen=True)
    class Options:
        weight: float = 1.0  # of the prompt's length
        tags: tuple[str, ...] = ()

    def key(self, request):
        return (request.num_prompt, request.arrival_index)

    def victim(self, running):
        return {victim}
"""

ATTENTION_OPTIONS = """
from typing import Literal

from lab.api import Attention, Capabilities, dataclass, register

WIDEST = 4


@register("attention", "{name}")
class Mine(Attention):
    \"\"\"Declares options and limits only.\"\"\"

    capabilities = Capabilities(devices={{"cpu"}}, head_dims={{64}}, packages=({packages}), priority=-5)

    @dataclass(frozen=True)
    class Options:
        num_splits: int = WIDEST  # parts that the context is cut into
        scale: float | None = None
        mode: Literal["fast", "exact"] = "fast"

    def kv_shape(self, num_blocks, block_size): ...
    def plan(self, batch, reuse=None): ...
    def write(self, k_TKH, v_TKH, kv, slots_T): ...
    def attend(self, q_TNH, kv, plan, out_TNH): ...
    def export_blocks(self, kv, block_ids): ...
    def load_blocks(self, kv, block_ids, x_XB2KH): ...
"""


def policy(folder: Path, name: str = "shortest", victim: str = "running[-1]", file: str | None = None) -> Path:
    """A file with a policy plugin; `victim` is the expression that picks one."""
    return _write(folder, file or f"{name}.py", POLICY.format(name=name, victim=victim))


def attention(folder: Path, name: str = "split", packages: str = "") -> Path:
    """A file with an attention plugin that has options and limits, and cannot attend."""
    return _write(folder, f"{name}.py", ATTENTION_OPTIONS.format(name=name, packages=packages))


def broken_syntax(folder: Path, kind: str = "policy", name: str = "crooked") -> Path:
    return _write(folder, f"{name}.py", f'@register("{kind}", "{name}")\nclass Mine(:\n    pass\n')


def broken_import(folder: Path, name: str = "lost") -> Path:
    text = POLICY.format(name=name, victim="running[-1]")
    return _write(folder, f"{name}.py", "import no_such_package_anywhere\n" + text)


def _write(folder: Path, file: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    return folder / file
