"""A model's description: all of it but the weights, there and back."""

import dataclasses

import pytest

from experiments.models import hf, load, tiny
from tests.helpers.paths import GOLDEN

# How a model runs is said by the caller, and not by the files.
_RUNTIME = ("dtype", "param_dtype", "remat", "attention_block", "token_block")


def _architecture(config):
  fields = dataclasses.asdict(config)
  return {name: x for name, x in fields.items() if name not in _RUNTIME}


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2", "qwen3", "tiny"])
def test_a_description_comes_back_as_it_was(name, tmp_path):
  if name == "tiny":
    model = tiny.make_tiny(0)
  else:
    model = load.from_path(GOLDEN / name)
  hf.save_description(tmp_path, model.config, model.tokenizer, "bfloat16")
  config, tokenizer = hf.load_description(tmp_path)
  assert _architecture(config) == _architecture(model.config)
  assert not list(tmp_path.glob("*.safetensors"))
  text = "What is 3 + 5?"
  assert tokenizer.encode(text) == model.tokenizer.encode(text)
  assert tokenizer.eos_ids == model.tokenizer.eos_ids
  assert tokenizer.pad_id == model.tokenizer.pad_id
  chat = [{"role": "user", "content": text}]
  assert tokenizer.apply_chat(chat) == model.tokenizer.apply_chat(chat)


def test_a_description_replaces_another_one(tmp_path):
  first, second = load.from_path(GOLDEN / "qwen3"), tiny.make_tiny(0)
  hf.save_description(tmp_path, first.config, first.tokenizer, "float32")
  (tmp_path / "chat_template.jinja").write_text("another model's")
  hf.save_description(tmp_path, second.config, second.tokenizer, "float32")
  config, tokenizer = hf.load_description(tmp_path)
  assert config == second.config
  assert tokenizer.apply_chat([{"role": "user", "content": "1 + 2"}]) == "1 + 2"
  assert sorted(file.name for file in tmp_path.iterdir()) == [
      "config.json",
      "generation_config.json",
      "tokenizer.json",
      "tokenizer_config.json",
  ]


def test_a_refused_description_leaves_the_earlier_one(tmp_path):
  model = tiny.make_tiny(0)
  hf.save_description(tmp_path, model.config, model.tokenizer, "float32")
  biased = dataclasses.replace(model.config, qkv_bias=True)
  with pytest.raises(ValueError, match="cannot be written with qkv_bias=True"):
    hf.save_description(tmp_path, biased, model.tokenizer, "float32")
  assert hf.load_description(tmp_path)[0] == model.config


def test_a_missing_description_names_the_file(tmp_path):
  with pytest.raises(ValueError, match=r"no config\.json"):
    hf.load_description(tmp_path)
