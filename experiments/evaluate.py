"""Accuracy on held-out prompts, by greedy decoding.

python -m experiments.evaluate --model=DIR --task=addition
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import app, flags
import jax
import numpy as np

from experiments import decoder, pretrained, sharding, tasks
from experiments import rollout as rollout_lib
from experiments.tokenizer import Tokenizer

PyTree = Any


class Sample(NamedTuple):
  """One prompt as the model saw it, what it wrote, and what that earned."""

  prompt: str
  completion: str
  reward: float


def encode_prompts(
    tokenizer: Tokenizer, examples: Sequence[tasks.Example]
) -> list[list[int]]:
  """Token ids of each example's prompt, rendered with the chat template."""
  return [
      tokenizer.encode(tokenizer.apply_chat(example.prompt))
      for example in examples
  ]


def decode_completions(
    tokenizer: Tokenizer, rollout: rollout_lib.Rollout
) -> list[str]:
  """The text of each row's generated tokens, special tokens left out."""
  tokens = np.asarray(rollout.tokens)
  mask = np.asarray(rollout.completion_mask)
  return [
      tokenizer.decode(row[keep])
      for row, keep in zip(tokens, mask, strict=True)
  ]


def respond(
    model: decoder.Decoder,
    params: PyTree,
    tokenizer: Tokenizer,
    examples: Sequence[tasks.Example],
    key: jax.Array,
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    temperature: float,
    group_size: int = 1,
) -> rollout_lib.Rollout:
  """Responses to the examples' prompts; arguments as for `rollout.generate`.

  Args:
    model: the decoder.
    params: its parameters.
    tokenizer: the model's tokenizer.
    examples: one per prompt.
    key: a `jax.random` key.
    max_prompt_tokens: length that prompts are padded to.
    max_new_tokens: limit of a response in tokens.
    temperature: 0 is greedy decoding.
    group_size: responses to each prompt; they are adjacent.

  Returns:
    A rollout of `len(examples) * group_size` responses.

  Raises:
    ValueError: a prompt is longer than `max_prompt_tokens`.
  """
  tokens, valid = rollout_lib.pad_prompts(
      encode_prompts(tokenizer, examples), max_prompt_tokens, tokenizer.pad_id
  )
  return rollout_lib.generate(
      model,
      params,
      tokens,
      valid,
      key,
      max_new_tokens=max_new_tokens,
      temperature=temperature,
      eos_ids=tokenizer.eos_ids,
      pad_id=tokenizer.pad_id,
      group_size=group_size,
  )


def score(
    task: tasks.Task,
    tokenizer: Tokenizer,
    examples: Sequence[tasks.Example],
    rollout: rollout_lib.Rollout,
) -> tuple[list[str], np.ndarray]:
  """Text and reward of each response of `respond`.

  Returns:
    The completions, and `[len(completions)]` float32 rewards.
  """
  completions = decode_completions(tokenizer, rollout)
  n = len(completions) // len(examples)
  repeated = [example for example in examples for _ in range(n)]
  return completions, tasks.checked_rewards(task, repeated, completions)


def evaluate(
    model: decoder.Decoder,
    params: PyTree,
    tokenizer: Tokenizer,
    task: tasks.Task,
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    max_prompts: int,
) -> tuple[dict[str, float], list[Sample]]:
  """Decodes greedily and asks the task for rewards.

  Args:
    model: the decoder.
    params: its parameters.
    tokenizer: the model's tokenizer.
    task: whose held-out examples are used.
    max_prompt_tokens: length that prompts are padded to.
    max_new_tokens: limit of a completion in tokens.
    max_prompts: how many of the held-out examples, at most; they are decoded
      in one batch.

  Returns:
    Metrics: `accuracy` (mean reward), `length` (mean tokens of a completion)
    and `finished` (fraction that ended by themselves); and every sample.

  Raises:
    ValueError: a prompt is longer than `max_prompt_tokens`.
  """
  examples = task.heldout()[:max_prompts]
  rollout = respond(
      model,
      params,
      tokenizer,
      examples,
      jax.random.key(0),  # Greedy decoding draws nothing.
      max_prompt_tokens=max_prompt_tokens,
      max_new_tokens=max_new_tokens,
      temperature=0.0,
  )
  rollout = sharding.fetch(rollout)
  completions, rewards = score(task, tokenizer, examples, rollout)
  metrics = {
      "accuracy": float(np.mean(rewards)),
      "length": float(np.mean(np.sum(rollout.completion_mask, axis=1))),
      "finished": float(np.mean(rollout.finished)),
  }
  texts = [
      tokenizer.decode(ids, skip_special=False)
      for ids in encode_prompts(tokenizer, examples)
  ]
  samples = map(Sample, texts, completions, map(float, rewards))
  return metrics, list(samples)


def main(names: flags.FlagValues) -> None:
  loaded = pretrained.load(names.model)
  metrics, samples = evaluate(
      decoder.Decoder(loaded.config),
      loaded.params,
      loaded.tokenizer,
      tasks.make_task(names.task, seed=0),
      max_prompt_tokens=names.max_prompt_tokens,
      max_new_tokens=names.max_new_tokens,
      max_prompts=names.prompts,
  )
  for sample in samples[: names.show]:
    question = sample.prompt.strip().replace("\n", "\\n")
    print(f"{sample.reward:.2f}  {question}  ->  {sample.completion!r}")
  print(
      f"accuracy {metrics['accuracy']:.3f} on {len(samples)} held-out prompts"
      f" of {names.task}; {metrics['length']:.1f} tokens a completion"
  )


if __name__ == "__main__":
  flags.DEFINE_string("model", None, "Hugging Face directory or GGUF file.")
  flags.DEFINE_string("task", "addition", "A name as in config.task.name.")
  flags.DEFINE_integer("max_prompt_tokens", 64, "Prompts are padded to this.")
  flags.DEFINE_integer("max_new_tokens", 16, "Limit of a completion.")
  flags.DEFINE_integer("prompts", 96, "Held-out prompts, at most.")
  flags.DEFINE_integer("show", 5, "Samples to print.")
  flags.mark_flag_as_required("model")
  app.run(lambda argv: main(flags.FLAGS))
