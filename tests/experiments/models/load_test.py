"""Models in, models out: Hugging Face directories and GGUF files."""

import dataclasses
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _optional
from experiments.models import hf, load, stacking
from experiments.models.decoder import Decoder
from tests.helpers.paths import GOLDEN

FAMILIES = ("llama", "llama3", "qwen2", "qwen3")

safetensors = _optional.require("safetensors.numpy", "train")
gguf = _optional.require("gguf", "train")


@pytest.fixture
def model_dir(tmp_path):
  """Copies a golden directory to change it."""

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
  """Rewrites `model.safetensors` after `change(tensors)`."""
  file = directory / "model.safetensors"
  tensors = safetensors.load_file(file)
  change(tensors)
  safetensors.save_file(tensors, file)


# Hugging Face directories.


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
  """Names, shapes, dtype and bits, so transformers cannot tell them apart."""
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


def test_parameters_are_read_in_the_dtype_asked_for():
  low = load.from_path(GOLDEN / "llama", param_dtype="bfloat16")
  assert low.config.param_dtype == "bfloat16"
  high = load.from_path(GOLDEN / "llama")
  cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), high.params)
  chex.assert_trees_all_equal(low.params, cast)  # The file is in bfloat16.


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


# Bad directories.


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


def test_paths_that_are_no_model(tmp_path):
  with pytest.raises(FileNotFoundError, match="no model at"):
    load.from_path(tmp_path / "nothing")
  file = tmp_path / "model.bin"
  file.write_bytes(b"x")
  with pytest.raises(ValueError, match=r"nor a \.gguf file"):
    load.from_path(file)


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


# GGUF files.

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(value, head_dim):
  """Row i and row i + head_dim / 2 of a head become neighbours."""
  half = head_dim // 2
  order = np.stack([np.arange(half), np.arange(half) + half], 1).ravel()
  heads = value.reshape(-1, head_dim, *value.shape[1:])
  return heads[:, order].reshape(value.shape)


def write_gguf(file, family, skip="", quantise="", extra=None, **metadata):
  """A golden checkpoint as the GGUF file that llama.cpp's converter makes."""
  config = load.from_path(GOLDEN / family).config
  writer = gguf.GGUFWriter(file, config.family)
  writer.add_block_count(config.n_layers)
  writer.add_context_length(config.max_length)
  writer.add_embedding_length(config.d_model)
  writer.add_feed_forward_length(config.d_ff)
  writer.add_head_count(config.n_heads)
  writer.add_head_count_kv(config.n_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("smollm")
  writer.add_token_list(["<|im_end|>", "A", "B", "AB"])
  writer.add_token_types([3, 1, 1, 1])
  writer.add_token_merges(["A B"])
  writer.add_eos_token_id(0)
  for key, value in metadata.items():
    writer.add_string(key.replace("__", "."), value)
  source = safetensors.load_file(GOLDEN / family / "model.safetensors")
  for name, value in source.items():
    value = value.astype(np.float32)
    if config.family == "llama" and ("q_proj" in name or "k_proj" in name):
      value = interleave(value, config.head_dim)
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in GGUF_NAMES.items():
      name = name.replace(theirs, ours)
    if name == skip:
      continue
    raw_dtype = None
    if quantise and quantise in name:
      raw_dtype = gguf.GGMLQuantizationType.Q8_0
      value = gguf.quantize(value, raw_dtype)
    writer.add_tensor(name, value, raw_dtype=raw_dtype)
  if extra is not None:
    writer.add_tensor(extra, np.zeros(32, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return file


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_holds_the_same_model(family, tmp_path):
  expected = load.from_path(GOLDEN / family)
  made = load.from_path(write_gguf(tmp_path / "model.gguf", family))
  assert made.config == expected.config
  chex.assert_trees_all_equal(made.params, expected.params)
  assert made.tokenizer.eos_ids == (0,)


def test_row_order_matters_for_llama(tmp_path):
  """Reading a Llama file as if it were in our order gives other logits."""
  expected = load.from_path(GOLDEN / "llama")
  kernel = expected.params["layers"]["q_proj"]["kernel"]
  rows = np.asarray(kernel[0]).T
  mixed = jnp.stack([interleave(rows, 8).T, kernel[1]])
  params = jax.tree.map(lambda x: x, expected.params)
  params["layers"]["q_proj"]["kernel"] = mixed
  golden = np.load(GOLDEN / "llama" / "logits.npz")
  apply = jax.jit(Decoder(expected.config).apply)
  logits = apply({"params": params}, golden["tokens"], golden["valid"])
  assert np.abs(logits - golden["logits"])[golden["valid"]].max() > 1e-2


def test_a_quantised_gguf_file_is_dequantised(tmp_path):
  """Q8_0: each 32 inputs of a unit share a scale and have 127 steps."""
  exact = load.from_path(GOLDEN / "llama").params["layers"]
  file = write_gguf(tmp_path / "model.gguf", "llama", quantise="ffn_gate")
  made = load.from_path(file).params["layers"]
  chex.assert_trees_all_equal(made["up_proj"], exact["up_proj"])
  kernel = np.asarray(exact["gate_proj"]["kernel"])  # 32 inputs: one block.
  error = np.abs(made["gate_proj"]["kernel"] - kernel)
  step = np.abs(kernel).max(axis=1, keepdims=True) / 127
  # Half a step, and the scale's own rounding to float16 over 127 steps.
  assert (error <= step * (0.5 + 127 * 2**-11)).all()
  assert error.max() > 0


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_gguf_file_is_refused(tmp_path, part):
  file = write_gguf(tmp_path / "model.gguf", "llama")
  content = file.read_bytes()
  file.write_bytes(content[: int(part * len(content))])
  with pytest.raises(ValueError, match=r"model\.gguf is truncated"):
    load.from_path(file)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"skip": "blk.1.attn_k.weight"}, r"no tensor blk\.1\.attn_k\.weight"),
        ({"extra": "blk.0.lora.weight"}, r"does not use: blk\.0\.lora\.weight"),
        ({"extra": "rope_freqs.weight"}, "stretches its rotary frequencies"),
        ({"llama__rope__scaling__type": "yarn"}, r"rope\.scaling\.type='yarn'"),
    ],
)
def test_a_gguf_model_we_cannot_follow_is_refused(tmp_path, changes, match):
  file = write_gguf(tmp_path / "model.gguf", "llama", **changes)
  with pytest.raises(ValueError, match=match):
    load.from_path(file)


def test_gguf_files_of_unknown_architecture_are_refused(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  match = "unknown architecture 'mamba' .known: llama, qwen2, qwen3"
  with pytest.raises(ValueError, match=match):
    load.from_path(tmp_path / "a.gguf")


# Stacking.


def test_stacking_asks_for_each_parameter_once():
  config = load.from_path(GOLDEN / "llama").config
  asked = []

  def read(path, layer):
    asked.append((path, layer))
    shape = stacking.param_shapes(config)[path]
    shape = shape if layer is None else shape[1:]
    return "x", np.full(shape, -1 if layer is None else layer, np.float32)

  params = stacking.stack(config, read)
  assert len(asked) == len(set(asked)) == 2 + 9 * config.n_layers
  scale = params["layers"]["attn_norm"]["scale"]
  np.testing.assert_array_equal(scale[:, 0], [0, 1])
