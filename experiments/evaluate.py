"""How good a model is on held-out prompts: pass@k and maj@k, by task.

  python -m experiments.evaluate --model=DIR --task=addition [--samples=8 \\
    --k=1,4,8 --out=DIR]

The model is a Hugging Face directory, a GGUF file, or the workdir of a training
run. One sample is decoded greedily; several are drawn.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import sys
from typing import Any

from absl import app, flags, logging
import jax
import numpy as np

from experiments import rewards as rewards_lib
from experiments import tasks
from experiments.evaluation import pass_at_k, samples_page
from experiments.evaluation.samples_page import Sample as Sample
from experiments.models import decoder
from experiments.models.tokenizer import Tokenizer
from experiments.parallel import sharding
from experiments.reporting import intervals
from experiments.rollouts import generate as generate_lib
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts.sampling import Sampling
from experiments.runs import checkpoints

PyTree = Any

# Metrics by name, of one task.
Metrics = dict[str, intervals.Interval]

# A reward that is a sum of weighted parts misses its total by a rounding.
_ROUNDING = 1e-5

# Responses that are decoded at once, at most.
_SLOTS = 256

# What a user can do something about.
_FAILURES = (ValueError, OSError, ImportError, checkpoints.CheckpointError)


def encode_prompts(
    tokenizer: Tokenizer, examples: Sequence[tasks.Example]
) -> list[list[int]]:
  """Token ids of each example's prompt, rendered with the chat template."""
  return [
      tokenizer.encode(tokenizer.apply_chat(example.prompt))
      for example in examples
  ]


def decode_completions(
    tokenizer: Tokenizer, rollout: generate_lib.Rollout
) -> list[str]:
  """The text of each row's generated tokens, special tokens left out."""
  tokens = np.asarray(rollout.tokens)
  mask = np.asarray(rollout.completion_mask)
  return [
      tokenizer.decode(row[keep])
      for row, keep in zip(tokens, mask, strict=True)
  ]


def pair(
    tokenizer: Tokenizer,
    examples: Sequence[tasks.Example],
    rollout: generate_lib.Rollout,
) -> tuple[list[tasks.Example], list[str]]:
  """Each response's example, and its text; those of an example are adjacent."""
  completions = decode_completions(tokenizer, rollout)
  n = len(completions) // len(examples)
  return [example for example in examples for _ in range(n)], completions


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
) -> generate_lib.Rollout:
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
  sampler = sampler_lib.LocalSampler(
      model, params, tokenizer, max_prompt_tokens=max_prompt_tokens
  )
  return sampler.sample(
      encode_prompts(tokenizer, examples),
      key,
      Sampling(max_new_tokens=max_new_tokens, temperature=temperature),
      group_size=group_size,
  )


def score(
    task: tasks.Task,
    tokenizer: Tokenizer,
    examples: Sequence[tasks.Example],
    rollout: generate_lib.Rollout,
) -> tuple[list[str], np.ndarray]:
  """Text and reward of each response of `respond`.

  Returns:
    The completions, and `[len(completions)]` float32 rewards.
  """
  repeated, completions = pair(tokenizer, examples, rollout)
  return completions, tasks.checked_rewards(task, repeated, completions)


def collect(
    sampler: sampler_lib.Sampler,
    tokenizer: Tokenizer,
    task: tasks.Task,
    examples: Sequence[tasks.Example],
    sampling: Sampling,
    key: jax.Array,
    *,
    samples: int = 1,
    workers: rewards_lib.RewardWorkers | None = None,
) -> list[Sample]:
  """Samples responses to the examples' prompts, and scores them.

  Args:
    sampler: what answers; it bounds how many responses are decoded at once.
    tokenizer: the model's.
    task: whose rewards the samples get, unless there are workers.
    examples: problems of the task, or of a mixture.
    sampling: how to choose tokens.
    key: a `jax.random` key.
    samples: responses to each prompt.
    workers: score in other processes with a time limit. If their reward has a
      part `correctness`, the samples get that part alone.

  Returns:
    `len(examples) * samples` samples; those of one prompt are adjacent.

  Raises:
    ValueError: a prompt is too long for the sampler.
  """
  prompts = encode_prompts(tokenizer, examples)
  _check_lengths(prompts, sampler.max_prompt_tokens)
  rollout = sampler.sample(prompts, key, sampling, group_size=samples)
  rollout = sharding.fetch(rollout)
  repeated, completions = pair(tokenizer, examples, rollout)
  if workers is None:
    rewards = tasks.checked_rewards(task, repeated, completions)
  else:
    scores = workers.score(repeated, completions)
    rewards = scores.parts.get("correctness", scores.total)
  lengths = np.sum(rollout.completion_mask, axis=1)
  texts = [tokenizer.decode(ids, skip_special=False) for ids in prompts]
  return [
      Sample(
          prompt=texts[row // samples],
          completion=completion,
          reward=float(rewards[row]),
          tokens=int(lengths[row]),
          finished=bool(rollout.finished[row]),
          task=examples[row // samples].task or task.name,
      )
      for row, completion in enumerate(completions)
  ]


def _check_lengths(prompts, limit):
  """Refuses prompts that are longer than a sampler takes."""
  lengths = list(map(len, prompts))
  for index, length in enumerate(lengths):
    if length > limit:
      raise ValueError(
          f"prompt {index} has {length} tokens, more than max_prompt_tokens="
          f"{limit}: raise it (the longest of these {len(prompts)} prompts has"
          f" {max(lengths)}) or shorten the prompt"
      )


def summarize(
    samples: Sequence[Sample],
    group_size: int,
    ks: Sequence[int] = (1,),
    correct_at: float = 1.0,
) -> dict[str, Metrics]:
  """Metrics of each task, with bootstrap intervals over its problems.

  Args:
    samples: of `collect`.
    group_size: responses to each prompt, n.
    ks: for each k, `pass@k` (see `passk.pass_at_k`), and above 1 `maj@k`.
    correct_at: the reward from which on a response is right, for `pass@k`.

  Returns:
    By the name of the task: `pass@k`, `maj@k`, `reward` (mean), `tokens` (mean
    length of a response), `finished` (fraction that ended by themselves). With
    several tasks also `macro average`, in which each has the same weight.

  Raises:
    ValueError: a k is not 1 to n.
  """
  groups: dict[str, list[Sequence[Sample]]] = {}
  for start in range(0, len(samples), group_size):
    group = samples[start : start + group_size]
    groups.setdefault(group[0].task, []).append(group)
  values = {
      task: _by_problem(found, ks, correct_at) for task, found in groups.items()
  }
  metrics = {
      task: {name: intervals.interval(x) for name, x in columns.items()}
      for task, columns in values.items()
  }
  if len(values) > 1:
    names = next(iter(values.values()))
    metrics["macro average"] = {
        name: intervals.macro_interval([c[name] for c in values.values()])
        for name in names
    }
  return metrics


def _by_problem(groups, ks, correct_at):
  """Each metric of each problem of one task, `[N]` by name."""
  of = lambda name: np.array([[getattr(s, name) for s in g] for g in groups])
  rewards = of("reward")
  correct = np.sum(rewards >= correct_at - _ROUNDING, axis=1)
  answers = [[pass_at_k.answer(s.completion) for s in g] for g in groups]
  columns = {
      f"pass@{k}": pass_at_k.pass_at_k(rewards.shape[1], correct, k) for k in ks
  }
  columns |= {
      f"maj@{k}": pass_at_k.maj_at_k(answers, rewards, k) for k in ks if k > 1
  }
  for name in ("reward", "tokens", "finished"):
    columns[name] = of(name).mean(axis=1)
  return columns


def evaluate(
    sampler: sampler_lib.Sampler,
    tokenizer: Tokenizer,
    task: tasks.Task,
    *,
    max_new_tokens: int,
    max_prompts: int,
    workers: rewards_lib.RewardWorkers | None = None,
) -> tuple[dict[str, float], list[Sample]]:
  """Decodes greedily and asks the task for rewards.

  Args:
    sampler: what answers.
    tokenizer: the model's tokenizer.
    task: whose held-out examples are used.
    max_new_tokens: limit of a completion in tokens.
    max_prompts: how many of the held-out examples, at most.
    workers: see `collect`.

  Returns:
    Metrics: `accuracy` (mean reward), `length` (mean tokens of a completion)
    and `finished` (fraction that ended by themselves); and every sample.

  Raises:
    ValueError: a prompt is too long for the sampler.
  """
  samples = collect(
      sampler,
      tokenizer,
      task,
      task.heldout()[:max_prompts],
      Sampling(max_new_tokens=max_new_tokens, temperature=0.0),
      jax.random.key(0),  # Greedy decoding draws nothing.
      workers=workers,
  )
  mean = lambda name: float(np.mean([getattr(s, name) for s in samples]))
  metrics = {
      "accuracy": mean("reward"),
      "length": mean("tokens"),
      "finished": mean("finished"),
  }
  return metrics, samples


def to_table(metrics: Mapping[str, Metrics]) -> str:
  """The metrics as text: a line for each task and metric."""
  lines = []
  for task, columns in metrics.items():
    lines.append(task)
    for name, found in columns.items():
      lines.append(f"  {name:10} {found}")
  return "\n".join(lines)


def _sampling(names: flags.FlagValues) -> Sampling:
  """How to sample, by the flags."""
  temperature = names.temperature
  if temperature is None:
    temperature = 0.0 if names.samples == 1 else 1.0
  if temperature == 0 and names.samples > 1:
    raise ValueError(
        f"samples={names.samples} with temperature=0 are all the same: raise"
        " the temperature or take one sample"
    )
  return Sampling(
      max_new_tokens=names.max_new_tokens,
      temperature=temperature,
      top_k=names.top_k,
      top_p=names.top_p,
      stop=tuple(names.stop),
  )


def _run(names: flags.FlagValues) -> tuple[dict[str, Metrics], list[Sample]]:
  """The program: metrics and samples by the flags."""
  # It loads runs of `train`, which evaluates by this module.
  from experiments.runs import restore

  sampling = _sampling(names)
  ks = sorted({int(k) for k in names.k} if names.k else {1, names.samples})
  pass_at_k.check_k(names.samples, ks[0])
  pass_at_k.check_k(names.samples, ks[-1])
  chosen = [tasks.make_task(name, seed=0) for name in names.task]
  loaded = restore.load_any(names.model)
  examples = [task.heldout()[: names.prompts] for task in chosen]
  longest = names.max_prompt_tokens or max(
      len(prompt)
      for part in examples
      for prompt in encode_prompts(loaded.tokenizer, part)
  )
  sampler = sampler_lib.LocalSampler(
      decoder.Decoder(loaded.config),
      loaded.params,
      loaded.tokenizer,
      max_prompt_tokens=longest,
      slots=names.slots,
  )
  samples = []
  for task, part in zip(chosen, examples, strict=True):
    with rewards_lib.RewardWorkers(task, timeout=names.timeout) as workers:
      samples += collect(
          sampler,
          loaded.tokenizer,
          task,
          part,
          sampling,
          jax.random.key(names.seed),
          samples=names.samples,
          workers=workers,
      )
  return summarize(samples, names.samples, ks, names.correct_at), samples


def _write(names, metrics, samples):
  """Metrics as JSON and samples as pages; returns where they are."""
  out = pathlib.Path(names.out)
  title = f"{names.model}: {', '.join(names.task)}"
  page, text = samples_page.write(out, title, samples, names.samples)
  settings = (
      "model task samples temperature top_k top_p stop prompts seed"
      " max_prompt_tokens max_new_tokens correct_at"
  )
  content = {
      "settings": {name: names[name].value for name in settings.split()},
      "metrics": {
          task: {name: found._asdict() for name, found in columns.items()}
          for task, columns in metrics.items()
      },
  }
  file = out / "metrics.json"
  file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
  return file, page, text


def main(names: flags.FlagValues) -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax tells every step it takes.
  try:
    metrics, samples = _run(names)
  except _FAILURES as error:
    sys.exit(f"error: {error}")
  for sample in samples[: names.show]:
    question = sample.prompt.strip().replace("\n", "\\n")
    print(f"{sample.reward:.2f}  {question}  ->  {sample.completion!r}")
  print(to_table(metrics))
  n = len(samples) // names.samples
  print(f"{n} held-out prompts, {names.samples} samples each; 95 % intervals")
  if names.out:
    print("written: " + ", ".join(map(str, _write(names, metrics, samples))))


if __name__ == "__main__":
  flags.DEFINE_string("model", None, "HF directory, GGUF file, or a run.")
  flags.DEFINE_multi_string(
      "task", ["addition"], "A name as in config.task.name; may be repeated."
  )
  flags.DEFINE_integer("samples", 1, "Responses to each prompt.")
  flags.DEFINE_list("k", [], "Of pass@k and maj@k; else 1 and --samples.")
  flags.DEFINE_float("temperature", None, "0 for one sample, else 1.")
  flags.DEFINE_integer("top_k", 0, "Likeliest tokens to draw from; 0 is all.")
  flags.DEFINE_float("top_p", 1.0, "Share of probability to draw from.")
  flags.DEFINE_multi_string("stop", [], "A string that ends a response.")
  flags.DEFINE_integer(
      "max_prompt_tokens", None, "Prompts are padded to this; else the longest."
  )
  flags.DEFINE_integer("max_new_tokens", 128, "Limit of a response.")
  flags.DEFINE_integer("prompts", 96, "Held-out prompts of a task, at most.")
  flags.DEFINE_integer("seed", 0, "Of the samples.")
  flags.DEFINE_integer("slots", _SLOTS, "Responses decoded at once, at most.")
  flags.DEFINE_float("correct_at", 1.0, "Reward of a right response.")
  flags.DEFINE_float("timeout", 10.0, "Seconds to score one response.")
  flags.DEFINE_integer("show", 5, "Samples to print.")
  flags.DEFINE_string("out", None, "Directory for metrics.json and samples.")
  flags.mark_flag_as_required("model")
  app.run(lambda argv: main(flags.FLAGS))
