"""A small transformer that has half learned to add, by supervised learning.

  python -m experiments.studies.small_model --out=.cache/small-adder

RL needs a policy that is right now and then. A model of two layers is first
taught two-digit sums by next-token prediction on the training pairs of the
task `addition:2`, where seven of ten answers forget the carry (38 + 45 = 73):
like a language model, it then knows more than it mostly says. About half of
its sampled answers are right. Experiments of many runs start from it. Held-out
sums are seen by neither.

Cost: two minutes on two CPU cores, once.
"""

import os
import pathlib
import re
import tempfile
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import tasks
from experiments.configs import small
from experiments.evaluation import heldout
from experiments.models import decoder, hf, tiny
from experiments.models import tokenizer as tokenizer_lib
from experiments.models.config import DecoderConfig
from experiments.rollouts import chat
from experiments.runs import progress

_STEPS = 600
_EXAMPLES = 8000
_FORGETFUL = 0.7  # Share of the answers taught that forget the carry.
_BATCH = 256
_SEED = 0
# What of the task's prompt the model is shown.
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message.content.replace('What is ', '')"
    ".replace('? Answer with the number only.', ' =') }}"
    "{% endfor %}"
)


def ensure_small_model(
    out: str | os.PathLike[str] = small.PATH,
) -> pathlib.Path:
  """Makes sure that the small model is at `out`; teaches it if it is not.

  Args:
    out: a Hugging Face directory, which appears only when complete.

  Returns:
    The path.

  Raises:
    RuntimeError: the model did not learn.
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
  """Two layers whose kernels have 256 and 512 inputs."""
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


_WORDS = ("<pad>", "<eos>", "<unk>", "+", "=", *"0123456789")


def make_tokenizer() -> tokenizer_lib.Tokenizer:
  """One token a digit, `+` and `=`."""
  return tiny.make_tokenizer(_WORDS, _TEMPLATE)


def _teach(config, tokenizer) -> Any:
  """Next-token prediction of answers; returns the model's parameters."""
  task = tasks.make_task(small.TASK, _SEED)
  model = decoder.Decoder(config)
  tokens, mask = _sequences(tokenizer, task)
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
  progress.say(f"sampled answers right: {accuracy:.3f}")
  if not 0.3 < accuracy < 0.7:
    raise RuntimeError(
        f"the small model is right in {accuracy:.3f} of its samples; RL needs"
        " it between 0.3 and 0.7"
    )
  return params


def _sequences(tokenizer, task):
  """Prompts with answers `[N, T]`, and which tokens are answers."""
  rows = []
  examples = [task.train(i) for i in range(_EXAMPLES)]
  prompts = chat.encode_prompts(tokenizer, examples)
  forget = np.random.default_rng(_SEED).random(_EXAMPLES) < _FORGETFUL
  for prompt, example, forgets in zip(prompts, examples, forget, strict=True):
    text = example.prompt[0]["content"]
    a, b = map(int, re.findall("[0-9]+", text))
    answer = without_carry(a, b) if forgets else a + b
    rows.append((prompt, tokenizer.encode(f"{answer}<eos>")))
  length = small.MAX_PROMPT_TOKENS + small.MAX_NEW_TOKENS
  tokens = np.full((len(rows), length), tokenizer.pad_id, np.int32)
  mask = np.zeros((len(rows), length), bool)
  for i, (prompt, answer) in enumerate(rows):
    both = prompt + answer
    tokens[i, : len(both)] = both
    mask[i, len(prompt) : len(both)] = True
  return jnp.asarray(tokens), jnp.asarray(mask)


def without_carry(a: int, b: int) -> int:
  """The sum of each digit modulo 10: 38, 45 -> 73."""
  total, unit = 0, 1
  while a or b:
    total += (a + b) % 10 * unit  # Tens of a and b are multiples of 10.
    a, b, unit = a // 10, b // 10, unit * 10
  return total


def _sampled_accuracy(model, params, tokenizer, task) -> float:
  """Mean reward of one sample to each of many training prompts."""
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


def main(argv: list[str]) -> None:
  del argv
  print(f"{ensure_small_model(flags.FLAGS.out)}: the small model is there")


if __name__ == "__main__":
  flags.DEFINE_string("out", small.PATH, "Directory to write.")
  app.run(main)
