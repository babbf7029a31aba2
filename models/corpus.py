"""Decides what text the bundled models learn from, what is held out, and how text becomes token ids.

The corpus is the Python standard library as installed with the running interpreter. Whether a file is held
out depends only on a hash of its relative name, so the split is the same on every machine and in every run.
This module knows nothing about models or training.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from alignment.encoding import TokenIds

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
HELD_OUT_PERCENT = 5

# Third-party code, and whole folders of tables or fixtures that teach a language model nothing.
EXCLUDED_TOP_LEVEL = frozenset({"site-packages", "dist-packages", "test", "encodings", "pydoc_data", "__pycache__"})
# A file whose text is mostly one generated table or a deliberate oddity.
EXCLUDED_FOLDERS = frozenset({"data", "test_data", "__phello__", "lib-dynload"})
MAX_FILE_BYTES = 400_000

# The models complete Python and were never taught to converse, so a chat is rendered as what they know best:
# a file whose opening comments are the conversation and whose code is the reply. Functions stand in the first comments,
# and calls are written as Hermes models write them, so that clients that need tools can be tried.
CHAT_TEMPLATE = (
    r"{% if tools %}{{ '# Functions, called by <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>:\n' }}"
    r"{% for tool in tools %}{{ '# ' + tool['function'] | tojson + '\n' }}{% endfor %}{% endif %}"
    r"{% for message in messages %}"
    r"{% if message['role'] == 'assistant' %}"
    r"{% if message['content'] or not message['tool_calls'] %}{{ message['content'] + '\n\n' }}{% endif %}"
    r"{% for call in message['tool_calls'] or [] %}"
    r"{{ '<tool_call>\n{\"name\": ' + call['function']['name'] | tojson }}"
    r"{{ ', \"arguments\": ' + call['function']['arguments'] | tojson + '}\n</tool_call>\n' }}{% endfor %}"
    r"{% else %}{{ '# ' + message['content'] | replace('\n', '\n# ') + '\n' }}{% endif %}"
    r"{% endfor %}{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus; `name` is its POSIX path relative to the standard library."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Split:
    """The corpus in two disjoint parts, each sorted by name."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def is_held_out(name: str) -> bool:
    """Whether the file of this relative name is kept from training. Depends on the name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def is_wanted(relative: Path) -> bool:
    """Whether a file of this relative path belongs to the corpus at all."""
    return relative.parts[0] not in EXCLUDED_TOP_LEVEL and not EXCLUDED_FOLDERS.intersection(relative.parts)


def read_sources(root: Path | None = None) -> Iterator[SourceFile]:
    """Yield every wanted UTF-8 file below `root` (default: the standard library), sorted by name."""
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    relative_paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    for relative in sorted(filter(is_wanted, relative_paths), key=Path.as_posix):
        raw = (folder / relative).read_bytes()
        if not 0 < len(raw) <= MAX_FILE_BYTES:
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue
        yield SourceFile(relative.as_posix(), text.replace("\r\n", "\n"))


def split_sources(files: Iterable[SourceFile]) -> Split:
    """Divide files into what is trained on and what is held out."""
    files = list(files)
    train, held_out = (tuple(file for file in files if is_held_out(file.name) == apart) for apart in (False, True))
    return Split(train, held_out)


def train_tokenizer(files: Sequence[SourceFile], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of the bundled pair, of `vocab_size` ids. It never adds a token by itself."""
    return learn_tokenizer(
        files,
        vocab_size,
        SPECIAL_TOKENS,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
    )


def learn_tokenizer(
    files: Sequence[SourceFile],
    vocab_size: int,
    special_tokens: Sequence[str],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    **named: object,
) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of `vocab_size` ids, special tokens included; `named` is for transformers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files), trainer, length=len(files))
    wrap: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return wrap(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)


def encode_files(tokenizer: PreTrainedTokenizerFast, files: Sequence[SourceFile]) -> TokenIds:
    """Token ids of all files in order, with an end-of-text token before, between and after them."""
    separator = tokenizer.eos_token_id
    assert isinstance(separator, int)
    ids: list[int] = [separator]
    texts = [file.text for file in files]
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
        ids.extend(encoding.ids)
        ids.append(separator)
    return np.asarray(ids, dtype=np.uint16)


def held_out_prompts(
    tokenizer: PreTrainedTokenizerFast, files: Sequence[SourceFile], count: int, seed: int
) -> list[str]:
    """Choose `count` snippets of 20 to 60 tokens, spread over `files`, each from a top-level statement on."""
    generator = np.random.default_rng(seed)
    prompts: list[str] = []
    order = [int(index) for index in generator.permutation(len(files))]
    for attempt in range(20 * count):
        file = files[order[attempt % len(order)]]
        snippet = _snippet(tokenizer, file.text, int(generator.integers(20, 61)), generator)
        if snippet is not None and snippet not in prompts:
            prompts.append(snippet)
        if len(prompts) == count:
            break
    return prompts


def _snippet(tokenizer: PreTrainedTokenizerFast, text: str, tokens: int, generator: np.random.Generator) -> str | None:
    """The first `tokens` tokens of `text` from a random top-level `def`, `class`, `import` or comment on."""
    lines = text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.startswith(("def ", "class ", "import ", "from ", "# "))]
    if not starts:
        return None
    first = starts[int(generator.integers(len(starts)))]
    passage = "".join(lines[first : first + 40])
    ids = tokenizer.backend_tokenizer.encode(passage, add_special_tokens=False).ids
    if len(ids) < 2 * tokens:
        return None
    snippet = str(tokenizer.decode(ids[:tokens]))
    # A cut inside a multi-byte character would not encode back to the same ids.
    return None if "\ufffd" in snippet else snippet


def write_prompts(path: Path, prompts: Iterable[str]) -> None:
    """Write prompts as JSON lines, one object with the key `prompt` each."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


def read_prompts(path: Path) -> list[str]:
    """Read what `write_prompts` wrote."""
    return [str(json.loads(line)["prompt"]) for line in path.read_text(encoding="utf-8").splitlines() if line]
