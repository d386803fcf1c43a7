"""Tests of reading and writing Hugging Face directories."""

import dataclasses
import json
import shutil

import chex
import jax
import numpy as np
import pytest

from experiments import _optional
from experiments.models import hf, load, tiny
from tests.helpers.paths import GOLDEN

FAMILIES = ("llama", "llama3", "qwen2", "qwen3")

safetensors = _optional.require("safetensors.numpy", "train")


@pytest.fixture
def model_dir(tmp_path):
  """Returns a function that copies a golden directory, to be changed."""

  def copy(family):
    target = tmp_path / family
    shutil.copytree(GOLDEN / family, target)
    return target

  return copy


def edit_config(directory, **changes):
  file = directory / "config.json"
  content = json.loads(file.read_text()) | changes
  content = {k: v for k, v in content.items() if v != "absent"}
  file.write_text(json.dumps(content))


def edit_weights(directory, change):
  """Applies `change(tensors)` to `model.safetensors`."""
  file = directory / "model.safetensors"
  tensors = safetensors.load_file(file)
  change(tensors)
  safetensors.save_file(tensors, file)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_loaded_again_bit_for_bit(family, tmp_path):
  config, params, tokenizer = load.from_path(GOLDEN / family)
  hf.save(tmp_path, config, params, tokenizer)
  config_2, params_2, tokenizer_2 = load.from_path(tmp_path)
  assert config_2 == config
  chex.assert_trees_all_equal(params_2, params)
  assert tokenizer_2.eos_ids == tokenizer.eos_ids
  chat = [{"role": "user", "content": "What is 3 + 5?"}]
  assert tokenizer_2.apply_chat(chat) == tokenizer.apply_chat(chat)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_is_saved_has_the_tensors_that_transformers_wrote(
    family, tmp_path
):
  """Names, shapes, dtypes and bits are equal."""
  hf.save(tmp_path, *load.from_path(GOLDEN / family), dtype="bfloat16")
  ours = safetensors.load_file(tmp_path / "model.safetensors")
  theirs = safetensors.load_file(GOLDEN / family / "model.safetensors")
  assert ours.keys() == theirs.keys()
  mode = lambda name: (tmp_path / name).stat().st_mode
  assert mode("model.safetensors") == mode("config.json")
  for name, value in theirs.items():
    assert ours[name].dtype == value.dtype
    np.testing.assert_array_equal(ours[name], value)


def test_transformers_gives_the_same_logits(tmp_path):
  torch = pytest.importorskip("torch", reason="torch is not installed")
  auto = pytest.importorskip("transformers", reason="no transformers")
  for family in FAMILIES:
    directory = tmp_path / family
    hf.save(directory, *load.from_path(GOLDEN / family))
    model = auto.AutoModelForCausalLM.from_pretrained(directory)
    golden = np.load(GOLDEN / family / "logits.npz")
    row = golden["tokens"][:1]  # The first row has no padding.
    with torch.no_grad():
      logits = model(torch.tensor(row)).logits.numpy()
    np.testing.assert_allclose(logits, golden["logits"][:1], atol=1e-5)


def test_large_weights_are_split_over_files(tmp_path):
  config, params, tokenizer = load.from_path(GOLDEN / "qwen3")
  hf.save(tmp_path, config, params, tokenizer, max_shard_bytes=30_000)
  files = sorted(f.name for f in tmp_path.glob("*.safetensors"))
  n = len(files)
  assert n > 3
  assert files[0] == f"model-00001-of-{n:05d}.safetensors"
  sizes = {}
  for file in files:
    tensors = safetensors.load_file(tmp_path / file)
    sizes[file] = sum(t.nbytes for t in tensors.values())
  assert max(sizes.values()) <= 30_000
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  assert index["metadata"]["total_size"] == sum(sizes.values())
  chex.assert_trees_all_equal(load.from_path(tmp_path).params, params)

  # One file afterwards: no shard of the earlier model is left to be read.
  doubled = jax.tree.map(lambda x: 2 * x, params)
  hf.save(tmp_path, config, doubled, tokenizer)
  assert [f.name for f in tmp_path.glob("*.safetensors")] == [
      "model.safetensors"
  ]
  chex.assert_trees_all_equal(load.from_path(tmp_path).params, doubled)


def test_the_older_rope_fields_are_read_too(model_dir):
  directory = model_dir("llama3")
  expected = load.from_path(directory).config
  rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
  theta = rope.pop("rope_theta")
  rope["type"] = rope.pop("rope_type")
  edit_config(
      directory, rope_parameters="absent", rope_theta=theta, rope_scaling=rope
  )
  assert load.from_path(directory).config == expected


def test_every_id_that_ends_a_turn_is_known(model_dir):
  directory = model_dir("llama")
  edit_config(directory, eos_token_id=[1, 7])
  generation = directory / "generation_config.json"
  generation.write_text(json.dumps({"eos_token_id": [9, 7]}))
  assert load.from_path(directory).tokenizer.eos_ids == (1, 7, 9)


def test_a_tied_head_that_is_stored_must_repeat_the_embedding(model_dir):
  directory = model_dir("llama")
  expected = load.from_path(directory).params
  embedding = "model.embed_tokens.weight"

  def add(tensors):
    tensors["lm_head.weight"] = tensors[embedding].copy()

  def change(tensors):
    tensors["lm_head.weight"][3, 3] += 1

  edit_weights(directory, add)
  chex.assert_trees_all_equal(load.from_path(directory).params, expected)
  edit_weights(directory, change)
  with pytest.raises(ValueError, match="differs from the embedding"):
    load.from_path(directory)


def test_parameters_of_another_model_are_not_saved(tmp_path):
  config, params, tokenizer = load.from_path(GOLDEN / "llama")
  wider = dataclasses.replace(config, d_ff=64)
  with pytest.raises(ValueError, match="has shape"):
    hf.save(tmp_path / "a", wider, params, tokenizer)
  biased = dataclasses.replace(config, qkv_bias=True)
  with pytest.raises(ValueError, match="cannot be written with qkv_bias=True"):
    hf.save(tmp_path / "a", biased, params, tokenizer)
  untied = dataclasses.replace(config, tied_head=False)
  with pytest.raises(ValueError, match="disagree about lm_head/kernel"):
    hf.save(tmp_path / "a", untied, params, tokenizer)
  other = dataclasses.replace(config, family="gemma")
  with pytest.raises(ValueError, match="llama, qwen2, qwen3, got 'gemma'"):
    hf.save(tmp_path / "a", other, params, tokenizer)
  assert not (tmp_path / "a").exists()


# Refused directories.


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        (
            "llama",
            {"architectures": ["GPT2LMHeadModel"]},
            "unknown architecture 'GPT2LMHeadModel'.*LlamaForCausalLM, Qwen2",
        ),
        (
            "llama",
            {"architectures": "absent", "model_type": "mamba"},
            "unknown architecture 'mamba'.*known: llama, qwen2, qwen3",
        ),
        ("llama", {"hidden_size": "absent"}, "has no 'hidden_size'"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True .* only False"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' .* only 'silu'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope scaling of type 'yarn'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
            "rope scaling .* lacks 'low_freq_factor'",
        ),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types .'sliding_attention'.",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"quantization_config": {}}, "quantization_config"),
        ("llama", {"vocab_size": 100}, "128 ids, the model only .*100"),
        (
            "llama",
            {"intermediate_size": 40},
            r"mlp\.down_proj\.weight has shape \[48, 32\] .* \[40, 32\]",
        ),
        (
            "llama",
            {"num_hidden_layers": 3},
            r"no tensor model\.layers\.2\.[a-z_.]+weight",
        ),
        ("llama", {"num_hidden_layers": 1}, r"not use: .*model\.layers\.1\."),
        ("llama", {"tie_word_embeddings": False}, r"no tensor lm_head\.weight"),
        ("llama3", {"tie_word_embeddings": True}, "differs from the embedding"),
    ],
)
def test_a_configuration_we_cannot_follow_is_refused(
    model_dir, family, changes, match
):
  directory = model_dir(family)
  edit_config(directory, **changes)
  with pytest.raises(ValueError, match=match):
    load.from_path(directory)


def test_a_missing_and_an_unknown_tensor_are_named(model_dir):
  directory = model_dir("llama")
  name = "model.layers.1.self_attn.k_proj.weight"
  edit_weights(directory, lambda tensors: tensors.pop(name))
  with pytest.raises(ValueError, match=f"no tensor {name}: incomplete"):
    load.from_path(directory)

  directory = model_dir("qwen2")
  extra = np.zeros(3, np.float32)
  edit_weights(directory, lambda tensors: tensors.update(adapter=extra))
  with pytest.raises(ValueError, match="does not use: adapter"):
    load.from_path(directory)


def test_a_directory_without_weights_is_refused(model_dir):
  directory = model_dir("llama")
  (directory / "model.safetensors").unlink()
  with pytest.raises(ValueError, match="llama has no weights"):
    load.from_path(directory)
  (directory / "config.json").unlink()
  with pytest.raises(ValueError, match=r"has no config\.json"):
    load.from_path(directory)


def test_a_truncated_weight_file_is_refused(model_dir):
  directory = model_dir("llama")
  file = directory / "model.safetensors"
  content = file.read_bytes()
  for size in (0, 100, len(content) // 2, len(content) - 1):
    file.write_bytes(content[:size])
    match = rf"truncated or corrupt \({size} bytes"
    with pytest.raises(ValueError, match=match):
      load.from_path(directory)


def test_a_missing_shard_is_named(model_dir):
  directory = model_dir("llama3")
  (directory / "model-00002-of-00002.safetensors").unlink()
  with pytest.raises(ValueError, match=r"00002\.safetensors is missing"):
    load.from_path(directory)


def test_a_shard_without_its_tensor_is_named(model_dir):
  directory = model_dir("llama3")
  index = json.loads((directory / "model.safetensors.index.json").read_text())
  name = next(iter(index["weight_map"]))
  file = directory / index["weight_map"][name]
  tensors = safetensors.load_file(file)
  del tensors[name]
  safetensors.save_file(tensors, file)
  with pytest.raises(ValueError, match=f"has no tensor {name}"):
    load.from_path(directory)


# Descriptions: everything of a model except its weights.

# Settings of how a model runs, which a description does not contain.
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
