"""Makes the golden files in this folder with torch and transformers.

  python tests/golden/make_golden.py [smollm2.gguf]

The files were made with torch 2.13, transformers 5.24 and, for the tokenizer of
the given GGUF file, gguf 0.19. The tests that read them need none of the three.
"""

import json
import pathlib
import sys
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

HERE = pathlib.Path(__file__).parent

CHATML = """\
{% for message in messages %}
{% if loop.first and message.role != 'system' %}
<|system|>{{ bos_token }} be brief<|end|>
{% endif %}
{% if message.role not in ['system', 'user', 'assistant'] %}
    {{ raise_exception('no role ' + message.role) }}
{% endif %}
<|{{ message.role }}|>{{ message['content'] | trim }}<|end|>
{% if message.facts is defined %}{{ message.facts | tojson }}{% endif %}
{% endfor %}
{% if tools %}never{% endif %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""

CHATS = [
    [{"role": "user", "content": " What is 3 + 5? "}],
    [
        {"role": "system", "content": "Only digits."},
        {"role": "user", "content": "7 & <b>2</b>", "facts": {"ä": [1, "<"]}},
        {"role": "assistant", "content": "9"},
        {"role": "user", "content": "and 1?"},
    ],
]

TEXTS = [
    "What is 3 + 5? It is 8.",
    "def f(x):\n    return x ** 2  # 12345\n\n",
    "  two  spaces\tand\r\n a tab   ",
    "été über naïve 漢字 😀",
    "e\u0301 is composed by some",
    "we'll IT'S don't 1234567 x1y22",
    "a<|im_end|>b <|end|>c",
]

SHARED = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

ROPE = {"rope_type": "default", "rope_theta": 1000.0}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # So short that heads of eight features have all three kinds of wavelength.
    "original_max_position_embeddings": 32,
}

MODELS = {
    "llama": (
        transformers.LlamaConfig,
        {"tie_word_embeddings": True, "rope_parameters": ROPE},
    ),
    "llama3": (
        transformers.LlamaConfig,
        {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
    ),
    "qwen2": (
        transformers.Qwen2Config,
        {"tie_word_embeddings": True, "rope_parameters": ROPE},
    ),
    "qwen3": (
        transformers.Qwen3Config,
        {"tie_word_embeddings": False, "head_dim": 16, "rope_parameters": ROPE},
    ),
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
  """Makes a byte-level BPE tokenizer of 128 ids, trained on the texts above."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
      [
          tokenizers.pre_tokenizers.Digits(individual_digits=True),
          tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
      ]
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  special = ["<|bos|>", "<|end|>", "<|pad|>"]
  special += ["<|system|>", "<|user|>", "<|assistant|>"]
  trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=SHARED["vocab_size"],
      special_tokens=special,
      show_progress=False,
  )
  backend.train_from_iterator([*TEXTS, CHATML] * 2, trainer)
  return transformers.PreTrainedTokenizerFast(
      tokenizer_object=backend,
      bos_token="<|bos|>",
      eos_token="<|end|>",
      pad_token="<|pad|>",
      chat_template=CHATML,
  )


def make_model(
    name: str,
    tokenizer: transformers.PreTrainedTokenizerFast,
    batch: dict[str, np.ndarray],
) -> None:
  """Saves a random checkpoint in bfloat16, and its float32 logits."""
  kind, fields = MODELS[name]
  torch.manual_seed(len(name) + ord(name[-1]))
  model = transformers.AutoModelForCausalLM.from_config(
      kind(**SHARED, **fields)
  )
  with torch.no_grad():
    for key, value in model.named_parameters():
      value.normal_(0.0, 0.3)
      if key.endswith("norm.weight"):
        value.add_(1.0)
  model = model.to(torch.bfloat16)
  directory = HERE / name
  # The untied Llama is saved in shards, the others in one file.
  shard = "30KB" if name == "llama3" else "1GB"
  model.save_pretrained(directory, max_shard_size=shard)
  tokenizer.save_pretrained(directory)

  # Loaded again, because `to` has also rounded the model's rotary table.
  model = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32
  ).eval()
  valid = torch.tensor(batch["valid"])
  positions = (valid.long().cumsum(1) - 1).clamp(min=0)
  with torch.no_grad():
    logits = model(
        torch.tensor(batch["tokens"]),
        attention_mask=valid.long(),
        position_ids=positions,
    ).logits
  np.savez_compressed(directory / "logits.npz", logits=logits.numpy(), **batch)


def make_batch() -> dict[str, np.ndarray]:
  """Makes three left-padded rows of twelve tokens."""
  rng = np.random.default_rng(0)
  valid = np.arange(12)[None] >= np.array([0, 3, 7])[:, None]
  tokens = rng.integers(6, SHARED["vocab_size"], valid.shape)
  return {"tokens": np.where(valid, tokens, 2), "valid": valid}


def describe(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, Any]:
  """Encodes the texts and renders the chats."""

  def encode(text):
    return tokenizer.encode(text, add_special_tokens=False)

  def chat(messages, prompt):
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )

  return {
      "texts": [[text, encode(text)] for text in TEXTS],
      "chats": [
          [messages, prompt, chat(messages, prompt)]
          for messages in CHATS
          for prompt in (True, False)
      ],
  }


def make_splits() -> dict[str, Any]:
  """Splits the texts like transformers' Qwen2 and Llama 3 before the merges."""
  qwen = transformers.Qwen2Tokenizer().backend_tokenizer
  pattern = transformers.convert_slow_tokenizer.TikTokenConverter().pattern
  split = tokenizers.pre_tokenizers
  llama = split.Sequence(
      [
          split.Split(tokenizers.Regex(pattern), "isolated"),
          split.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
  )

  def cut(pre_tokenizer, text):
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]

  composed = qwen.normalizer.normalize_str
  return {
      "qwen2": [[t, cut(qwen.pre_tokenizer, composed(t))] for t in TEXTS],
      "llama-bpe": [[t, cut(llama, t)] for t in TEXTS],
  }


def dump(name: str, content: Any) -> None:
  """Writes a JSON file."""
  text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
  (HERE / name).write_text(text + "\n", "utf-8")


def main() -> None:
  tokenizer = make_tokenizer()
  batch = make_batch()
  for name in MODELS:
    make_model(name, tokenizer, batch)
  dump("tokenizer.json", describe(tokenizer))
  dump("splits.json", make_splits())
  if len(sys.argv) > 1:
    path = pathlib.Path(sys.argv[1])
    smollm = transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name
    )
    dump("smollm2.json", describe(smollm))


if __name__ == "__main__":
  main()
