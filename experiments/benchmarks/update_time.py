"""Times a whole update with several optimizers in one process.

  python -m experiments.benchmarks.update_time --out=docs/results/speed

and again with `--growth`.

An update is the train step: the loss forward and backward over all
micro-batches, the KL probe, the optimizer and the merge, on random data and
weights, without a rollout. The optimizers take turns, one update each, so that
other load on the machine affects all of them alike; ratios are ratios of
medians. `--growth` measures instead how time and memory grow with the size of a
smaller model's update.

Cost: eight minutes on two CPU cores, five with `--growth`; 10 GB of memory.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

from absl import flags
import jax

from experiments import _cli
from experiments.benchmarks import (
    timed_update,
    update_growth,
    update_time_report,
)
from experiments.benchmarks.timed_update import UpdateSize
from experiments.models import architectures
from experiments.models.config import DecoderConfig
from experiments.reporting import provenance


def run(values: Mapping[str, Any]) -> None:
  """Measures, prints tables and writes files.

  Args:
    values: Values of the flags by name.

  Raises:
    ValueError: Flags that cannot work.
  """
  settings = timed_update.parse_settings(
      values["optimizers"], timed_update.parse_ints("ranks", values["ranks"])
  )
  if values["repeats"] < 1:
    raise ValueError(f"repeats={values['repeats']} must be at least 1")
  architecture = (
      timed_update.SMALL
      if values["small"]
      else architectures.architecture(values["model"])
  )
  size = UpdateSize(
      **{f.name: values[f.name] for f in dataclasses.fields(UpdateSize)}
  )
  # Refuses sizes that contradict each other before anything slow happens.
  timed_update.training_config(settings[0], size)
  if values["out"]:
    pathlib.Path(values["out"]).mkdir(parents=True, exist_ok=True)
  if values["growth"]:
    _run_growth(values, architecture)
    return
  origin = _origin(values)
  results = timed_update.time_updates(
      settings,
      size,
      architecture,
      repeats=values["repeats"],
      seed=values["seed"],
  )
  measurement = origin | {"size": dataclasses.asdict(size), "rows": results}
  table = update_time_report.speed_table(measurement)
  print(table)
  if values["out"]:
    figure = update_time_report.speed_figure(measurement)
    name = f"speed-{size.sequences}x{size.tokens}"
    _write(pathlib.Path(values["out"]), name, measurement, table, figure)


def _run_growth(values: Mapping[str, Any], architecture: DecoderConfig) -> None:
  """Does what `run` does with `--growth`."""
  origin = _origin(values)
  grid = (
      update_growth.SMALL_GRID
      if values["small"]
      else update_growth.default_grid(architecture)
  )
  results = update_growth.measure_growth(
      grid, repeats=values["repeats"], seed=values["seed"]
  )
  table = update_time_report.growth_table(results)
  print(table)
  if values["out"]:
    measurement = origin | {"grid": dataclasses.asdict(grid), "rows": results}
    figure = update_time_report.growth_figure(results)
    _write(pathlib.Path(values["out"]), "growth", measurement, table, figure)


def _origin(values: Mapping[str, Any]) -> dict[str, Any]:
  """What a measurement says about its origin."""
  return {
      "command": provenance.command(),
      "model": "small" if values["small"] else values["model"],
      "weights": "random",
      "seed": values["seed"],
      "machine": provenance.machine(),
  }


def _write(
    folder: pathlib.Path,
    name: str,
    measurement: Mapping[str, Any],
    table: str,
    figure: Any,
) -> None:
  """Writes `name.json`, `name.md` and `name.png`."""
  data = json.dumps(measurement, indent=1) + "\n"
  (folder / f"{name}.json").write_text(data, "utf-8")
  (folder / f"{name}.md").write_text(table, "utf-8")
  figure.savefig(folder / f"{name}.png", dpi=150)


def main(values: flags.FlagValues) -> None:
  # This measures CPUs, whatever accelerators the machine has.
  jax.config.update("jax_platforms", "cpu")
  run(values.flag_values_dict())


def _define_flags() -> None:
  # GaLore is timed at one rank only: its first update, which decomposes every
  # gradient, takes two minutes.
  names = ["dense_adam", "lora", "galore:64", "logra"]
  size = UpdateSize()
  flags.DEFINE_string(
      "model", "smollm2-135m", "A name of experiments/models/architectures.py."
  )
  flags.DEFINE_list(
      "optimizers",
      names,
      "Optimizers to time, each at every rank or at its own (galore:64). Dense"
      " AdamW is always timed.",
  )
  flags.DEFINE_list(
      "ranks", ["16", "64", "256"], "Ranks of the optimizers that have one."
  )
  for name, text in {
      "sequences": "Responses per update.",
      "tokens": "Tokens per sequence, prompt and completion together.",
      "micro_batch": "Responses computed at once; divides --sequences.",
      "prompt_tokens": "Prompt tokens per sequence.",
      "probe": "Responses that the KL is predicted on.",
      "chunk": "Tokens whose logits are in memory at once.",
  }.items():
    flags.DEFINE_integer(name, getattr(size, name), text)
  flags.DEFINE_integer("repeats", 5, "Timed updates per optimizer.")
  flags.DEFINE_integer("seed", 0, "Random seed of weights and batch.")
  flags.DEFINE_string("out", None, "Folder for JSON, tables and pictures.")
  flags.DEFINE_bool(
      "growth", False, "Measure how time and memory grow with size instead."
  )
  flags.DEFINE_bool("small", False, "Use a model of a few thousand parameters.")


if __name__ == "__main__":
  _define_flags()
  _cli.run(main)
