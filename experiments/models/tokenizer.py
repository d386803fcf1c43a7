"""Converts text to token ids and back, and renders chats.

Tokenizers come from a Hugging Face directory or from the metadata of a GGUF
file. The `tokenizers` package does the work.
"""

from collections.abc import Callable, Mapping, Sequence
import datetime
import functools
import json
import pathlib
import re
from typing import Any

from experiments._optional import require

tokenizers = require("tokenizers", "train")
jinja2 = require("jinja2", "train")
jinja2_ext: Any = require("jinja2.ext", "train")
sandbox = require("jinja2.sandbox", "train")

# Tokens that end a turn or a text in any vocabulary that has them.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")

# How the kinds of `tokenizer.ggml.pre` in GGUF split text before the merges.
_DIGITS_1 = r"\p{N}"
_DIGITS_3 = r"\p{N}{1,3}"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The current time for chat templates, fixed so that prompts do not change from
# run to run. Llama 3's template uses the same date by default.
_TODAY = datetime.datetime(2024, 7, 26)

Message = Mapping[str, Any]


class Tokenizer:
  """A tokenizer with its chat template and the ids that end a turn.

  Attributes:
    eos_ids: All ids that end a turn, beginning with that of `eos_token`.
    pad_id: The id of padding; it can also be one of `eos_ids`.
    vocab_size: The highest id plus 1, including added tokens. The model's
      embedding can have more rows.
    settings: The content of `tokenizer_config.json`, with the chat template.
  """

  def __init__(
      self,
      backend: Any,
      settings: Mapping[str, Any],
      extra_eos_ids: Sequence[int] = (),
  ):
    """Wraps a tokenizer of the `tokenizers` package.

    Args:
      backend: A `tokenizers.Tokenizer`.
      settings: `eos_token` and, optionally, `bos_token`, `unk_token`,
        `pad_token` and `chat_template`, as in `tokenizer_config.json`.
      extra_eos_ids: Ids that end a turn in addition to that of `eos_token`.

    Raises:
      ValueError: If `eos_token` is missing or not in the vocabulary, or if the
        chat template has a syntax error.
    """
    self._backend = backend
    self.settings = dict(settings)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    self._tokens = {name: _content(settings, name) for name in names}
    if self._tokens["eos_token"] is None:
      raise ValueError("eos_token is missing: rollouts would never end")
    eos = self._known("eos_token")
    ids = [eos, *extra_eos_ids, *map(backend.token_to_id, _ENDS)]
    self.eos_ids: tuple[int, ...] = tuple(
        dict.fromkeys(i for i in ids if i is not None)
    )
    has_pad = self._tokens["pad_token"] is not None
    self.pad_id: int = self._known("pad_token") if has_pad else eos
    ids_by_token = backend.get_vocab(with_added_tokens=True)
    self.vocab_size: int = max(ids_by_token.values()) + 1
    template = settings["chat_template"] if "chat_template" in settings else ""
    self._template = _compile(template) if template else None

  def _known(self, name: str) -> int:
    """Returns the id of a named token, which must be in the vocabulary."""
    token = self._tokens[name]
    index = self._backend.token_to_id(token)
    if index is None:
      raise ValueError(f"{name} {token!r} is not in the vocabulary")
    return index

  def encode(self, text: str, add_special: bool = False) -> list[int]:
    """Converts a text to token ids.

    Args:
      text: The text. Special tokens in it become their ids, as the output of a
        chat template needs.
      add_special: Whether to add the special tokens that the model's tokenizer
        puts around a plain text, such as a begin token. Leave it off for chats.

    Returns:
      The ids.
    """
    return self._backend.encode(text, add_special_tokens=add_special).ids

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    """Converts token ids to text.

    Args:
      ids: The ids.
      skip_special: Whether to leave out special tokens.

    Returns:
      The text.
    """
    ids = [int(i) for i in ids]
    return self._backend.decode(ids, skip_special_tokens=skip_special)

  def token_bytes(self) -> list[bytes]:
    """Returns the UTF-8 bytes that each id adds to a decoded text.

    Special tokens add nothing, as in `decode`. The bytes of a character can be
    spread over several tokens.

    Returns:
      A list of `vocab_size` byte strings.

    Raises:
      ValueError: If the tokenizer's decoder is of an unknown kind.
    """
    decoder = json.loads(self._backend.to_str())["decoder"]
    name = None if decoder is None else decoder["type"]
    if name not in _BYTES:
      raise ValueError(
          f"the bytes of tokens are unknown for a tokenizer with decoder"
          f" {name!r} (known: {', '.join(_BYTES)}): give no stop strings"
      )
    added = self._backend.get_added_tokens_decoder()

    def one(index):
      if index in added:
        token = added[index]
        return b"" if token.special else token.content.encode()
      text = self._backend.id_to_token(index)
      return b"" if text is None else _BYTES[name](text)

    return [one(i) for i in range(self.vocab_size)]

  def apply_chat(
      self,
      messages: Sequence[Message],
      add_generation_prompt: bool = True,
      **switches: Any,
  ) -> str:
    """Renders a conversation with the model's chat template.

    Args:
      messages: Dicts with `role` and `content`, oldest first.
      add_generation_prompt: Whether to open the assistant's turn.
      **switches: Other variables that the template reads, such as
        `enable_thinking=False`.

    Returns:
      The text to encode.

    Raises:
      ValueError: If the model has no chat template, or if the template refuses
        the messages or fails on them.
    """
    if self._template is None:
      raise ValueError(
          "this tokenizer has no chat template: give prompts as text, or add "
          "chat_template.jinja to the model directory"
      )
    tokens = {k: v for k, v in self._tokens.items() if v is not None}
    try:
      return self._template.render(
          messages=messages,
          add_generation_prompt=add_generation_prompt,
          **{"tools": None, "documents": None, **tokens, **switches},
      )
    except jinja2.TemplateError as error:
      raise ValueError(
          f"the chat template refuses these messages: {error}"
      ) from error
    except Exception as error:  # A template is code and can raise anything.
      raise ValueError(
          "the chat template fails on these messages"
          f" ({type(error).__name__}: {error}): {messages!r:.200}"
      ) from error

  def check_fits(self, rows: int, path: str | pathlib.Path) -> None:
    """Refuses a model whose embedding has fewer rows than there are ids.

    Args:
      rows: Number of rows of the embedding.
      path: Path of the model, for the error message.

    Raises:
      ValueError: If there are too few rows; the message names both numbers.
    """
    if self.vocab_size > rows:
      raise ValueError(
          f"the tokenizer in {path} has {self.vocab_size} ids, the model only "
          f"vocab_size={rows} rows of embeddings: use files of one model, and "
          "add embeddings for added tokens"
      )

  def save(self, directory: str | pathlib.Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`.

    Args:
      directory: An existing directory.
    """
    directory = pathlib.Path(directory)
    self._backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings}
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", "utf-8")


def from_directory(
    directory: str | pathlib.Path, extra_eos_ids: Sequence[int] = ()
) -> Tokenizer:
  """Loads the tokenizer of a Hugging Face directory.

  Args:
    directory: Holds `tokenizer.json`, `tokenizer_config.json` and, unless the
      latter contains the chat template, `chat_template.jinja`.
    extra_eos_ids: Ids that end a turn by the model's configuration.

  Returns:
    The tokenizer.

  Raises:
    ValueError: If a file is missing or cannot be read.
  """
  directory = pathlib.Path(directory)
  backend_file = directory / "tokenizer.json"
  settings_file = directory / "tokenizer_config.json"
  for file in (backend_file, settings_file):
    if not file.is_file():
      raise ValueError(f"{directory} has no {file.name}")
  try:
    backend = tokenizers.Tokenizer.from_file(str(backend_file))
  except Exception as error:  # The package raises nothing narrower.
    raise ValueError(f"{backend_file} cannot be read: {error}") from error
  # Both would silently change prompts and completions.
  backend.no_padding()
  backend.no_truncation()
  settings = json.loads(settings_file.read_text("utf-8"))
  template = directory / "chat_template.jinja"
  if template.is_file():
    settings["chat_template"] = template.read_text("utf-8")
  if "chat_template" in settings and isinstance(
      settings["chat_template"], list
  ):
    named = {t["name"]: t["template"] for t in settings["chat_template"]}
    settings["chat_template"] = named["default"] if "default" in named else ""
  return Tokenizer(backend, settings, extra_eos_ids)


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
  """Makes the tokenizer that a GGUF file describes.

  Args:
    metadata: The file's metadata; keys that begin with `tokenizer.` are used.

  Returns:
    The tokenizer.

  Raises:
    ValueError: If the file's tokenizer is not byte-level BPE of a known kind.
  """
  prefix = "tokenizer.ggml."
  model, pre = metadata[prefix + "model"], metadata[prefix + "pre"]
  if model != "gpt2":
    raise ValueError(
        f"tokenizer model {model!r} in the GGUF file is not byte-level BPE "
        "('gpt2'): use the model's Hugging Face directory"
    )
  names = metadata[prefix + "tokens"]
  vocab = {name: i for i, name in enumerate(names)}
  merges = [tuple(m.split(" ", 1)) for m in metadata[prefix + "merges"]]
  normalizer, splitter, ignore_merges = gguf_splitter(pre)
  try:
    model = tokenizers.models.BPE(vocab, merges, ignore_merges=ignore_merges)
  except Exception as error:  # The package raises nothing narrower.
    raise ValueError(f"the GGUF file's merges are damaged: {error}") from error
  backend = tokenizers.Tokenizer(model)
  if normalizer is not None:
    backend.normalizer = normalizer
  backend.pre_tokenizer = splitter
  backend.decoder = tokenizers.decoders.ByteLevel()
  _add_tokens(backend, names, metadata[prefix + "token_type"])

  settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
  for key, name in _GGUF_TOKENS.items():
    if prefix + key in metadata:
      settings[name] = names[metadata[prefix + key]]
  if "tokenizer.chat_template" in metadata:
    settings["chat_template"] = metadata["tokenizer.chat_template"]
  ends = [prefix + "eot_token_id", prefix + "eom_token_id"]
  extra_eos_ids = [int(metadata[key]) for key in ends if key in metadata]
  return Tokenizer(backend, settings, extra_eos_ids)


_GGUF_TOKENS = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}


def gguf_splitter(pre: str) -> tuple[Any, Any, bool]:
  """Returns how a GGUF tokenizer splits text before the merges.

  Args:
    pre: The kind of splitting, `tokenizer.ggml.pre` in the file.

  Returns:
    A normalizer or None, a pre-tokenizer, and whether a word that is itself a
    token skips the merges.

  Raises:
    ValueError: If the kind is unknown.
  """
  split = tokenizers.pre_tokenizers
  if pre == "smollm":
    steps = [split.Digits(individual_digits=True)]
    steps.append(split.ByteLevel(add_prefix_space=False))
    return None, split.Sequence(steps), False
  digits = {"qwen2": _DIGITS_1, "llama-bpe": _DIGITS_3}
  if pre not in digits:
    raise ValueError(
        f"tokenizer kind {pre!r} in the GGUF file is unknown (known: smollm, "
        f"{', '.join(digits)}): use the model's Hugging Face directory"
    )
  pattern = tokenizers.Regex(_WORDS.replace("DIGITS", digits[pre]))
  steps = [split.Split(pattern, "isolated")]
  steps.append(split.ByteLevel(add_prefix_space=False, use_regex=False))
  nfc = tokenizers.normalizers.NFC() if pre == "qwen2" else None
  return nfc, split.Sequence(steps), pre == "llama-bpe"


def _add_tokens(
    backend: Any, names: Sequence[str], types: Sequence[int]
) -> None:
  """Adds control (3) and user-defined (4) tokens, which are never split."""
  control = [n for n, t in zip(names, types, strict=True) if t == 3]
  defined = [n for n, t in zip(names, types, strict=True) if t == 4]
  token = tokenizers.AddedToken
  backend.add_special_tokens(
      [token(name, special=True, normalized=False) for name in control]
  )
  backend.add_tokens([token(name, normalized=False) for name in defined])


@functools.cache
def _byte_of() -> dict[str, int]:
  """Returns the byte of each character of a byte-level vocabulary.

  In this table of GPT-2, printable bytes are written as themselves and the
  others as the characters from U+0100 on.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [i for i in range(256) if i not in printable]
  table = {chr(i): i for i in printable}
  return table | {chr(256 + n): i for n, i in enumerate(others)}


def _byte_level(text: str) -> bytes:
  """Returns the bytes of a byte-level token, or of a token in plain text."""
  table = _byte_of()
  if any(char not in table for char in text):
    return text.encode()
  return bytes(table[char] for char in text)


def _word_piece(text: str) -> bytes:
  """Returns the bytes of a SentencePiece token."""
  byte = re.fullmatch(r"<0x([0-9A-F]{2})>", text)
  if byte:
    return bytes([int(byte[1], 16)])
  return text.replace("▁", " ").encode()


# Converts a token to bytes, by the type of the tokenizer's decoder.
_BYTES: dict[str, Callable[[str], bytes]] = {
    "ByteLevel": _byte_level,
    "Fuse": str.encode,
    "Metaspace": _word_piece,
    "Sequence": _word_piece,
}


def _content(settings: Mapping[str, Any], name: str) -> str | None:
  """Returns a named token from its short or long JSON form, or None."""
  token = settings[name] if name in settings else None
  return token["content"] if isinstance(token, Mapping) else token


def _compile(template: str) -> Any:
  """Compiles a chat template, in a sandbox with the usual extensions."""

  # Marks the assistant's words, which are rendered unchanged.
  class Generation(jinja2_ext.Extension):

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
      next(parser.stream)
      ends = ["name:endgeneration"]
      return parser.parse_statements(ends, drop_needle=True)

  def refuse(message):
    raise jinja2.TemplateError(message)

  # Jinja's own `tojson` escapes HTML.
  def tojson(value, **options):
    return json.dumps(value, **{"ensure_ascii": False, **options})

  env = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[jinja2_ext.loopcontrols, Generation],
  )
  env.filters["tojson"] = tojson
  env.globals["raise_exception"] = refuse
  env.globals["strftime_now"] = _TODAY.strftime
  try:
    return env.from_string(template)
  except jinja2.TemplateError as error:
    raise ValueError(f"chat_template cannot be read: {error}") from error
