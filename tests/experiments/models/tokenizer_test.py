"""Compares the tokenizer with transformers' ids and rendered chats."""

import json
import os
import pathlib

import pytest

from experiments import _optional
from experiments.models import gguf
from experiments.models import tokenizer as tokenizer_lib
from tests.helpers.paths import GOLDEN


@pytest.fixture(scope="module")
def tiny():
  return tokenizer_lib.from_directory(GOLDEN / "llama")


def read(name):
  return json.loads((GOLDEN / name).read_text("utf-8"))


def copy_with(tmp_path, **settings):
  """Copies the tiny tokenizer's files, with other settings."""
  source = GOLDEN / "llama"
  (tmp_path / "tokenizer.json").write_bytes(
      (source / "tokenizer.json").read_bytes()
  )
  content = json.loads((source / "tokenizer_config.json").read_text())
  content.update(settings)
  content = {k: v for k, v in content.items() if v is not None}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
  return tmp_path


def test_ids_are_those_of_transformers(tiny):
  for text, ids in read("tokenizer.json")["texts"]:
    assert tiny.encode(text) == ids


def test_rendered_chats_are_those_of_transformers(tiny):
  for messages, prompt, text in read("tokenizer.json")["chats"]:
    assert tiny.apply_chat(messages, add_generation_prompt=prompt) == text


@pytest.mark.parametrize(
    "style", ["chatml", "dated", "generation", "headers", "thinking"]
)
def test_every_style_of_template_renders_as_in_transformers(tiny, style):
  golden = read("templates.json")
  template = (GOLDEN / "templates" / f"{style}.jinja").read_text("utf-8")
  settings = {"eos_token": "<e>", "bos_token": "<s>", "chat_template": template}
  lib = _optional.require("tokenizers", "train")
  backend = lib.Tokenizer(lib.models.WordLevel({"<e>": 0}, "<e>"))
  made = tokenizer_lib.Tokenizer(backend, settings)
  cases = [row[1:] for row in golden["rendered"] if row[0] == f"{style}.jinja"]
  assert len(cases) >= 3
  for number, prompt, switches, text in cases:
    chat = golden["chats"][number]
    if isinstance(text, dict):
      match = f"refuses these messages: {text['error']}"
      with pytest.raises(ValueError, match=match):
        made.apply_chat(chat, prompt, **switches)
    else:
      assert made.apply_chat(chat, prompt, **switches) == text


def test_a_template_that_fails_names_the_messages(tmp_path):
  template = "{{ messages[0].content + 1 }}"
  made = tokenizer_lib.from_directory(
      copy_with(tmp_path, chat_template=template)
  )
  match = r"fails on these messages \(TypeError: .*\): .*'content': 'hi'"
  with pytest.raises(ValueError, match=match):
    made.apply_chat([{"role": "user", "content": "hi"}])


def test_holes_among_the_ids_count(tmp_path):
  lib = _optional.require("tokenizers", "train")
  backend = lib.Tokenizer(lib.models.WordLevel({"<e>": 0, "x": 9}, "<e>"))
  made = tokenizer_lib.Tokenizer(backend, {"eos_token": "<e>"})
  assert made.vocab_size == 10


def test_decoding_undoes_encoding(tiny):
  for text in ("What is 3 + 5?", "x\n  y", "été 漢字 😀"):
    assert tiny.decode(tiny.encode(text)) == text


def test_special_tokens_are_one_id_each_and_can_be_left_out(tiny):
  ids = tiny.encode("is<|end|>")
  assert ids[-1] == 1
  assert tiny.encode("<|end|>") == [1]
  assert tiny.decode(ids) == "is"
  assert tiny.decode(ids, skip_special=False) == "is<|end|>"


def test_named_ids(tiny):
  assert tiny.eos_ids == (1,)
  assert tiny.pad_id == 2
  assert tiny.vocab_size == 128


def test_every_known_end_of_turn_counts_once(tmp_path, tiny):
  backend = _optional.require("tokenizers", "train").Tokenizer.from_file(
      str(GOLDEN / "llama" / "tokenizer.json")
  )
  backend.add_special_tokens(["<|im_end|>"])
  settings = {"eos_token": {"content": "<|end|>"}}
  made = tokenizer_lib.Tokenizer(backend, settings, extra_eos_ids=[5, 1])
  assert made.eos_ids == (1, 5, 128)
  assert made.pad_id == 1  # Without a pad token, the end token is used.
  assert tiny.eos_ids == (1,)


def test_files_that_are_saved_give_the_same_tokenizer(tmp_path, tiny):
  tiny.save(tmp_path)
  again = tokenizer_lib.from_directory(tmp_path)
  assert again.settings == tiny.settings | {
      "tokenizer_class": again.settings["tokenizer_class"]
  }
  messages, prompt, text = read("tokenizer.json")["chats"][0]
  assert again.apply_chat(messages, prompt) == text
  assert again.encode(text) == tiny.encode(text)
  assert (again.eos_ids, again.pad_id) == (tiny.eos_ids, tiny.pad_id)


def test_the_default_of_several_templates_is_taken(tmp_path):
  templates = [
      {"name": "tool_use", "template": "tools"},
      {"name": "default", "template": "{{ messages[0].content }}!"},
  ]
  made = tokenizer_lib.from_directory(
      copy_with(tmp_path, chat_template=templates)
  )
  assert made.apply_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_template_may_mark_generations_and_break_loops(tmp_path):
  template = (
      "{% for m in messages %}{% generation %}{{ m.content }}"
      "{% endgeneration %}{% break %}{% endfor %}"
  )
  made = tokenizer_lib.from_directory(
      copy_with(tmp_path, chat_template=template)
  )
  assert made.apply_chat([{"content": "a"}, {"content": "b"}]) == "a"


def test_a_template_cannot_reach_the_interpreter(tmp_path):
  template = "{{ messages.__class__.__mro__ }}"
  made = tokenizer_lib.from_directory(
      copy_with(tmp_path, chat_template=template)
  )
  with pytest.raises(ValueError, match="unsafe"):
    made.apply_chat([])


def test_messages_that_the_template_refuses(tiny):
  with pytest.raises(ValueError, match="refuses these messages: no role robot"):
    tiny.apply_chat([{"role": "robot", "content": ""}])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"eos_token": None}, "eos_token is missing"),
        ({"eos_token": "<none>"}, "eos_token '<none>' is not in the vocab"),
        ({"chat_template": "{% for %}"}, "chat_template cannot be read"),
    ],
)
def test_bad_settings_are_refused(tmp_path, settings, match):
  with pytest.raises(ValueError, match=match):
    tokenizer_lib.from_directory(copy_with(tmp_path, **settings))


def test_missing_and_damaged_files_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
    tokenizer_lib.from_directory(tmp_path)
  copy_with(tmp_path)
  made = tokenizer_lib.from_directory(tmp_path)
  with pytest.raises(ValueError, match="has no chat template"):
    made.apply_chat([{"role": "user", "content": "hi"}])
  (tmp_path / "tokenizer.json").write_text('{"model"')
  with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
    tokenizer_lib.from_directory(tmp_path)


def gguf_metadata(pre, pieces=()):
  """GGUF metadata of a vocabulary of all bytes and some longer pieces."""
  alphabet = _optional.require("tokenizers", "train").pre_tokenizers.ByteLevel
  tokens = ["<|im_end|>", *sorted(alphabet.alphabet())]
  merges = []
  for piece in pieces:
    for end in range(2, len(piece) + 1):
      if piece[:end] not in tokens:
        tokens.append(piece[:end])
        merges.append(f"{piece[: end - 1]} {piece[end - 1]}")
  prefix = "tokenizer.ggml."
  return {
      prefix + "model": "gpt2",
      prefix + "pre": pre,
      prefix + "tokens": tokens,
      prefix + "token_type": [3] + [1] * (len(tokens) - 1),
      prefix + "merges": merges,
      prefix + "eos_token_id": 0,
  }


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_text_is_cut_as_transformers_cuts_it(pre):
  normalizer, splitter, _ = tokenizer_lib.gguf_splitter(pre)
  for text, pieces in read("splits.json")[pre]:
    if normalizer is not None:
      text = normalizer.normalize_str(text)
    assert [p for p, _ in splitter.pre_tokenize_str(text)] == pieces


def test_qwen_composes_accents_and_llama_does_not():
  ids = {}
  for pre in ("qwen2", "llama-bpe"):
    made = tokenizer_lib.from_gguf(gguf_metadata(pre))
    ids[pre] = [made.encode(text) for text in ("e\u0301", "\u00e9")]
  assert ids["qwen2"][0] == ids["qwen2"][1] == ids["llama-bpe"][1]
  assert ids["llama-bpe"][0] != ids["llama-bpe"][1]


def test_smollm_cuts_every_digit():
  metadata = gguf_metadata("smollm", ["12", "Ġis", "is"])
  made = tokenizer_lib.from_gguf(metadata)
  names = metadata["tokenizer.ggml.tokens"]
  ids = made.encode("is is 12<|im_end|>")
  assert [names[i] for i in ids] == ["is", "Ġis", "Ġ", "1", "2", "<|im_end|>"]
  assert made.decode(ids) == "is is 12"


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("model", "llama", "tokenizer model 'llama'.*not byte-level BPE"),
        ("pre", "tekken", "tokenizer kind 'tekken'.*unknown .known: smollm"),
    ],
)
def test_gguf_tokenizers_of_another_kind_are_refused(key, value, match):
  metadata = gguf_metadata("smollm") | {"tokenizer.ggml." + key: value}
  with pytest.raises(ValueError, match=match):
    tokenizer_lib.from_gguf(metadata)


@pytest.mark.skipif(
    "LOGRA_MODEL" not in os.environ,
    reason="needs the quickstart's model: LOGRA_MODEL=<file>.gguf",
)
def test_the_quickstart_models_ids_and_chats_are_those_of_transformers():
  metadata, _ = gguf.read_file(pathlib.Path(os.environ["LOGRA_MODEL"]))
  made = tokenizer_lib.from_gguf(metadata)
  golden = read("smollm2.json")
  for text, ids in golden["texts"]:
    assert made.encode(text) == ids
    assert made.decode(ids, skip_special=False) == text
  for messages, prompt, text in golden["chats"]:
    assert made.apply_chat(messages, prompt) == text
  # <|im_end|> and <|endoftext|>.
  assert made.eos_ids == (2, 0)


def test_a_missing_package_names_its_extra():
  match = r"'no_such_package' .* pip install 'logra-jax\[tasks\]'"
  with pytest.raises(ImportError, match=match):
    _optional.require("no_such_package.part", "tasks")
