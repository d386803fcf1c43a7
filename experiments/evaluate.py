"""Measures a model on held-out prompts: pass@k, maj@k and mean rewards by task.

One greedy response to each prompt:

  python -m experiments.evaluate --model=DIR --task=addition

Several responses to each prompt, on two tasks; writes metrics and samples:

  python -m experiments.evaluate --model=DIR --samples=8 --k=1,4,8 --out=OUT \\
    --task=addition --task=addition:2

DIR is a Hugging Face directory, a GGUF file, or the workdir of a training run.
docs/evaluation.md explains the metrics, docs/tasks.md the tasks.
"""

from collections.abc import Sequence
import json
import pathlib

from absl import flags
import jax

from experiments import _cli, tasks
from experiments import rewards as rewards_lib
from experiments.evaluation import heldout, pass_at_k, samples_page
from experiments.models import decoder
from experiments.models.pretrained import Pretrained
from experiments.reporting import provenance
from experiments.rollouts import chat
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts.sampling import Sampling
from experiments.runs import restore

# Flags that metrics.json records, next to the command itself.
_RECORDED = (
    "model task samples temperature top_k top_p stop prompts seed"
    " max_prompt_tokens max_new_tokens correct_at"
).split()


def _sampling(values: flags.FlagValues) -> Sampling:
  """Returns the sampling options that the flags ask for."""
  temperature = values.temperature
  if temperature is None:
    temperature = 0.0 if values.samples == 1 else 1.0
  if temperature == 0 and values.samples > 1:
    raise ValueError(
        f"samples={values.samples} with temperature=0 are all the same: raise"
        " the temperature or take one sample"
    )
  return Sampling(
      max_new_tokens=values.max_new_tokens,
      temperature=temperature,
      top_k=values.top_k,
      top_p=values.top_p,
      stop=tuple(values.stop),
  )


def _make_sampler(
    loaded: Pretrained,
    examples: Sequence[Sequence[tasks.Example]],
    values: flags.FlagValues,
) -> sampler_lib.LocalSampler:
  """Makes a sampler that takes the prompts of all tasks."""
  longest = values.max_prompt_tokens or max(
      len(prompt)
      for of_task in examples
      for prompt in chat.encode_prompts(loaded.tokenizer, of_task)
  )
  return sampler_lib.LocalSampler(
      decoder.Decoder(loaded.config),
      loaded.params,
      loaded.tokenizer,
      max_prompt_tokens=longest,
      slots=values.slots,
  )


def _evaluate(
    values: flags.FlagValues,
) -> tuple[dict[str, heldout.Metrics], list[samples_page.Sample]]:
  """Returns the metrics by task, and all samples."""
  sampling = _sampling(values)
  ks = sorted({int(k) for k in values.k} if values.k else {1, values.samples})
  pass_at_k.check_k(values.samples, ks[0])
  pass_at_k.check_k(values.samples, ks[-1])
  chosen = [tasks.make_task(name, seed=0) for name in values.task]
  loaded = restore.load_any(values.model)
  examples = [task.heldout()[: values.prompts] for task in chosen]
  sampler = _make_sampler(loaded, examples, values)
  samples = []
  for task, of_task in zip(chosen, examples, strict=True):
    with rewards_lib.RewardWorkers(task, timeout=values.timeout) as workers:
      samples += heldout.sample_and_score(
          sampler,
          loaded.tokenizer,
          task,
          of_task,
          sampling,
          jax.random.key(values.seed),
          group_size=values.samples,
          workers=workers,
      )
  metrics = heldout.summarize(samples, values.samples, ks, values.correct_at)
  return metrics, samples


def _write(
    values: flags.FlagValues,
    metrics: dict[str, heldout.Metrics],
    samples: Sequence[samples_page.Sample],
) -> tuple[pathlib.Path, ...]:
  """Writes the metrics as JSON and the samples as pages; returns the paths."""
  out = pathlib.Path(values.out)
  title = f"{values.model}: {', '.join(values.task)}"
  page, text = samples_page.write(out, title, samples, values.samples)
  content = {
      "command": provenance.command(),
      "settings": {name: values[name].value for name in _RECORDED},
      "metrics": {
          task: {name: value._asdict() for name, value in of_task.items()}
          for task, of_task in metrics.items()
      },
  }
  file = out / "metrics.json"
  file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
  return file, page, text


def main(values: flags.FlagValues) -> None:
  metrics, samples = _evaluate(values)
  for sample in samples[: values.show]:
    question = sample.prompt.strip().replace("\n", "\\n")
    print(f"{sample.reward:.2f}  {question}  ->  {sample.completion!r}")
  print(heldout.to_table(metrics))
  n = len(samples) // values.samples
  print(f"{n} held-out prompts, {values.samples} samples each; 95 % intervals")
  if values.out:
    print("written: " + ", ".join(map(str, _write(values, metrics, samples))))


def _define_flags() -> None:
  flags.DEFINE_string(
      "model", None, "Hugging Face directory, GGUF file, or workdir of a run."
  )
  flags.DEFINE_multi_string(
      "task", ["addition"], "Name of a task, as in config.task.name."
  )
  flags.DEFINE_integer("samples", 1, "Responses to each prompt.")
  flags.DEFINE_list(
      "k", [], "Which pass@k and maj@k to compute; default: 1 and --samples."
  )
  flags.DEFINE_float(
      "temperature", None, "Default: 0 for one sample, 1 for several."
  )
  flags.DEFINE_integer(
      "top_k", 0, "Draw from the k likeliest tokens; 0 means all."
  )
  flags.DEFINE_float(
      "top_p", 1.0, "Draw from the likeliest tokens with this probability."
  )
  flags.DEFINE_multi_string("stop", [], "String that ends a response.")
  flags.DEFINE_integer(
      "max_prompt_tokens", None, "Pad prompts to this; default: the longest."
  )
  flags.DEFINE_integer("max_new_tokens", 128, "Longest response in tokens.")
  flags.DEFINE_integer("prompts", 96, "Most held-out prompts per task.")
  flags.DEFINE_integer("seed", 0, "Random seed of the samples.")
  flags.DEFINE_integer("slots", 256, "Most responses decoded at once.")
  flags.DEFINE_float("correct_at", 1.0, "Least reward of a correct response.")
  flags.DEFINE_float("timeout", 10.0, "Seconds to score one response.")
  flags.DEFINE_integer("show", 5, "Number of samples to print.")
  flags.DEFINE_string(
      "out", None, "Directory to write metrics.json and pages of samples to."
  )
  flags.mark_flag_as_required("model")


if __name__ == "__main__":
  _define_flags()
  _cli.run(main)
