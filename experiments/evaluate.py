"""Measures a model on held-out prompts: pass@k and maj@k, by task.

  python -m experiments.evaluate --model=DIR --task=addition
  python -m experiments.evaluate --model=RUN --samples=8 --k=1,4,8 --out=DIR

The model is a Hugging Face directory, a GGUF file, or the workdir of a training
run. One sample per prompt is decoded greedily; several are drawn.
docs/evaluation.md explains the metrics.
"""

import json
import pathlib

from absl import flags
import jax

from experiments import _cli, tasks
from experiments import rewards as rewards_lib
from experiments.evaluation import heldout, pass_at_k, samples_page
from experiments.models import decoder
from experiments.rollouts import chat
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts.sampling import Sampling
from experiments.runs import restore


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


def _run(
    names: flags.FlagValues,
) -> tuple[dict[str, heldout.Metrics], list[samples_page.Sample]]:
  """The program: metrics and samples by the flags."""
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
      for prompt in chat.encode_prompts(loaded.tokenizer, part)
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
      samples += heldout.collect(
          sampler,
          loaded.tokenizer,
          task,
          part,
          sampling,
          jax.random.key(names.seed),
          samples=names.samples,
          workers=workers,
      )
  return (
      heldout.summarize(samples, names.samples, ks, names.correct_at),
      samples,
  )


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
  metrics, samples = _run(names)
  for sample in samples[: names.show]:
    question = sample.prompt.strip().replace("\n", "\\n")
    print(f"{sample.reward:.2f}  {question}  ->  {sample.completion!r}")
  print(heldout.to_table(metrics))
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
  flags.DEFINE_list(
      "k", [], "Which pass@k and maj@k; default: 1 and --samples."
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
  flags.DEFINE_multi_string("stop", [], "A string that ends a response.")
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
  flags.DEFINE_string("out", None, "Directory for metrics.json and samples.")
  flags.mark_flag_as_required("model")
  _cli.run(main)
