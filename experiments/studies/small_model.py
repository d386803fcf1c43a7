"""Teaches a small transformer to add, so that half of its answers are right.

  python -m experiments.studies.small_model --out=.cache/small-adder

RL needs a policy that is sometimes right. A model of two layers is taught
two-digit sums by next-token prediction on the training pairs of the task
`addition:2`, but seven of ten answers that it is taught forget the carry
(38 + 45 = 73). Like a language model, it then knows more than its most frequent
answers show. About half of its sampled answers are right. Studies of many runs
start from this model. Neither this training nor RL uses the held-out sums.

Cost: two minutes on two CPU cores, once.
"""

import os
import pathlib
import re
import tempfile

from absl import flags
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import _cli, tasks
from experiments.configs import small
from experiments.evaluation import heldout
from experiments.models import decoder, hf, tiny
from experiments.models import tokenizer as tokenizer_lib
from experiments.models.config import DecoderConfig
from experiments.rollouts import chat
from experiments.runs import progress

_STEPS = 600
_EXAMPLES = 8000
_FORGETFUL = 0.7  # Share of the taught answers that forget the carry.
_BATCH = 256
_SEED = 0
_WORDS = ("<pad>", "<eos>", "<unk>", "+", "=", *"0123456789")
# Reduces the task's prompt to the sum and an equals sign.
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message.content.replace('What is ', '')"
    ".replace('? Answer with the number only.', ' =') }}"
    "{% endfor %}"
)


def ensure_small_model(
    out: str | os.PathLike[str] = small.PATH,
) -> pathlib.Path:
  """Teaches and writes the small model unless it exists.

  Args:
    out: Directory in the Hugging Face format, which appears only when complete.

  Returns:
    The path of the directory.

  Raises:
    RuntimeError: If the share of right answers is not about a half.
  """
  out = pathlib.Path(out)
  if (out / "config.json").exists():
    return out
  out.parent.mkdir(parents=True, exist_ok=True)
  config, tokenizer = make_config(), make_tokenizer()
  params = _teach(config, tokenizer)
  with tempfile.TemporaryDirectory(dir=out.parent) as folder:
    made = pathlib.Path(folder) / "model"
    hf.save(made, config, params, tokenizer)
    os.replace(made, out)
  return out


def make_config() -> DecoderConfig:
  """Makes a configuration of two layers; kernels have 256 or 512 inputs."""
  return DecoderConfig(
      vocab_size=len(_WORDS),
      d_model=256,
      n_layers=2,
      n_heads=4,
      n_kv_heads=2,
      head_dim=64,
      d_ff=512,
      tied_head=False,
      max_length=16,
  )


def make_tokenizer() -> tokenizer_lib.Tokenizer:
  """Makes a tokenizer with a token for each digit, for `+` and for `=`."""
  return tiny.make_tokenizer(_WORDS, _TEMPLATE)


def _teach(
    config: DecoderConfig, tokenizer: tokenizer_lib.Tokenizer
) -> chex.ArrayTree:
  """Trains on next tokens of answers, and returns the model's parameters."""
  task = tasks.make_task(small.TASK, _SEED)
  model = decoder.Decoder(config)
  tokens, mask = taught_sequences(tokenizer, task)
  tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 50, _STEPS))
  init = jax.jit(model.init)
  params = init(jax.random.key(_SEED), jnp.zeros((1, 1), jnp.int32))["params"]

  def loss_fn(params, tokens, mask):
    logits = model.apply({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, tokens[:, 1:]
    )
    mask = mask[:, 1:]
    return jnp.sum(losses * mask) / jnp.sum(mask)

  @jax.jit
  def step(params, state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens[rows], mask[rows])
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  state = tx.init(params)
  rng = np.random.default_rng(_SEED)
  for i in range(1, _STEPS + 1):
    rows = rng.integers(len(tokens), size=_BATCH)
    params, state, loss = step(params, state, rows)
    if i % 100 == 0:
      progress.say(f"step {i} of {_STEPS}: loss {loss:.3f}")
  accuracy = _sampled_accuracy(model, params, tokenizer, task)
  progress.say(f"share of sampled answers that are right: {accuracy:.3f}")
  if not 0.3 < accuracy < 0.7:
    raise RuntimeError(
        "the share of the small model's sampled answers that are right is"
        f" {accuracy:.3f}; studies need one between 0.3 and 0.7"
    )
  return params


def taught_sequences(
    tokenizer: tokenizer_lib.Tokenizer, task: tasks.Task
) -> tuple[jax.Array, jax.Array]:
  """Makes the sequences that the model is taught.

  Args:
    tokenizer: The tokenizer of the model.
    task: The task whose training prompts are taught.

  Returns:
    Tokens of prompts with answers, int32 `[N, T]`, and which of them belong to
    answers, bool `[N, T]`.
  """
  rows = []
  examples = [task.train(i) for i in range(_EXAMPLES)]
  prompts = chat.encode_prompts(tokenizer, examples)
  forget = np.random.default_rng(_SEED).random(_EXAMPLES) < _FORGETFUL
  for prompt, example, forgets in zip(prompts, examples, forget, strict=True):
    text = example.prompt[0]["content"]
    a, b = map(int, re.findall("[0-9]+", text))
    total = without_carry(a, b) if forgets else a + b
    rows.append((prompt, tokenizer.encode(f"{total}<eos>")))
  length = small.MAX_PROMPT_TOKENS + small.MAX_NEW_TOKENS
  tokens = np.full((len(rows), length), tokenizer.pad_id, np.int32)
  mask = np.zeros((len(rows), length), bool)
  for i, (prompt, answer) in enumerate(rows):
    both = prompt + answer
    tokens[i, : len(both)] = both
    mask[i, len(prompt) : len(both)] = True
  return jnp.asarray(tokens), jnp.asarray(mask)


def without_carry(a: int, b: int) -> int:
  """Adds each digit modulo 10: 38 and 45 give 73."""
  total, unit = 0, 1
  while a or b:
    total += (a + b) % 10 * unit  # Higher digits vanish modulo 10.
    a, b, unit = a // 10, b // 10, unit * 10
  return total


def _sampled_accuracy(
    model: decoder.Decoder,
    params: chex.ArrayTree,
    tokenizer: tokenizer_lib.Tokenizer,
    task: tasks.Task,
) -> float:
  """Returns the mean reward of one response to each of 512 prompts."""
  examples = [task.train(i) for i in range(512)]
  rollout = heldout.respond(
      model,
      params,
      tokenizer,
      examples,
      jax.random.key(_SEED),
      max_prompt_tokens=small.MAX_PROMPT_TOKENS,
      max_new_tokens=small.MAX_NEW_TOKENS,
      temperature=1.0,
  )
  return float(np.mean(heldout.score(task, tokenizer, examples, rollout)[1]))


def main(values: flags.FlagValues) -> None:
  print(f"the small model is in {ensure_small_model(values.out)}")


if __name__ == "__main__":
  flags.DEFINE_string("out", small.PATH, "Directory to write the model to.")
  _cli.run(main)
