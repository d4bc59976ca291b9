"""Every fenced block of the README, of docs/ and of the pages of plugins is run, or says why not.

The HTML comment before a block tells how it is tested; a block without one fails:

    <!-- test: run -->            run it, bash or python, in a scratch folder that the blocks of one file share, in order
    <!-- test: write NAME -->     write it to that file of the scratch folder
    <!-- test: in tests/X.py -->  another test runs it
    <!-- test: show -->           it is no code: allowed for text blocks only

The default model is a tiny one here, put where the cache would hold the real one, so the commands run as they stand.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests import rigs
from tests.conftest import lend_native

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "plugins").glob("*/README.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!-- test: (run|show|write|in)(?: (\S+))? -->\n\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, its language, how it is tested, and the file that this names, if any."""

    page: Path
    line: int
    language: str
    text: str
    how: str
    name: str

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}-{self.how or 'unmarked'}"


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(encoding="utf-8"), []
    for fence in FENCE.finditer(text):
        comment = COMMENT.search(text[: fence.start()])
        how, name = comment.groups("") if comment else ("", "")
        found.append(Block(page, text.count("\n", 0, fence.start()) + 1, fence[1], fence[2], how, name))
    return found


ALL = [block for page in PAGES for block in blocks(page)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder for the blocks of a page, and the cache with the tiny model, by page."""
    cache = tmp_path_factory.mktemp("cache")
    lend_native(cache)
    folder = cache / "lab" / "models" / "smollm2"
    # wide keys: the pool takes what memory is free, and millions of tiny blocks would cost seconds a run
    rigs.mix(folder, max_position_embeddings=8192, num_key_value_heads=4, head_dim=256)
    write_byte_tokenizer(folder)
    return {page: tmp_path_factory.mktemp(page.stem) for page in PAGES} | {"cache": cache}


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer whose 256 tokens are the bytes, so that any prompt can be sent."""
    vocab = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("block", ALL, ids=[b.id for b in ALL])
def test_block(block, scratch):
    folder = scratch[block.page]
    if block.how == "run":
        for earlier in ALL:  # a block of files may have been another worker's
            if earlier.page == block.page and earlier.line < block.line and earlier.how == "write":
                write(earlier, folder)
        shells = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
        done = subprocess.run(
            [*shells[block.language], block.text],
            cwd=folder,
            env=environment(scratch["cache"]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    elif block.how == "write":
        write(block, folder)
    elif block.how == "in":
        assert (ROOT / block.name).is_file()
    else:
        assert block.how == "show" and block.language == "text", "say how this block is tested: see the top of this test"


def write(block, folder):
    path = folder / block.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")


def environment(cache: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LAB_", "WANDB_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as after activating the environment
    return kept | {"PATH": path, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def test_the_quickstart_is_two_commands_that_exist():
    first = next(b for b in ALL if b.page == PAGES[0])
    commands = [line.split("#")[0].strip() for line in first.text.splitlines()]
    assert commands == ["scripts/run", "scripts/test"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


def test_no_fence_is_overlooked():
    for page in PAGES:
        fences = [line for line in page.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith("```")]
        assert len(fences) == 2 * len(blocks(page)), f"{page.name} has a fence that the test cannot read"


def test_links_and_paths_lead_somewhere():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for path in re.findall(r"`((?:lab|plugins|conf|tests|scripts|experiments)/[\w./-]*)`", text):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
