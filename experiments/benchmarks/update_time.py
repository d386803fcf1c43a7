"""Time of the whole update, for several optimizers in one process.

  python -m experiments.benchmarks.update_time --out=docs/results/speed

and again with `--growth`.

An update is the train step itself: the loss forward and backward over all
micro-batches, the KL probe, the optimizer and the merge, without a rollout: a
fixed random batch stands for it, and random weights for the model's. One
update of every optimizer in turn, again and again, so that what else the
machine does falls on all of them; ratios are of medians. `--growth` measures
instead how time and memory grow with the size of a smaller model's update.

Cost: eight minutes on two CPU cores, and five for `--growth`; 10 GB of memory.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import os
import pathlib
import platform
import sys
import time
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments.configs import quickstart
from experiments.learning import batches, compiled_step, optimizers, train_step
from experiments.models import architectures, load
from experiments.models.decoder import Decoder, DecoderConfig
from experiments.parallel import sharding
from experiments.rollouts.rollout import Rollout
from experiments.runs import run_plot

BASELINE = "dense_adam"
_WITHOUT_RANK = (BASELINE, "dense_sgd", "muon")
# Update time over the baseline's that LoGRA should not exceed, by its rank.
REACH = {64: 0.75, 256: 0.85}


@dataclasses.dataclass(frozen=True)
class Size:
  """Sizes of an update.

  Attributes:
    sequences: responses in the update.
    tokens: of a sequence, prompt and completion together.
    micro_batch: responses computed at once; divides `sequences`.
    prompt_tokens: of a sequence.
    probe: responses that the KL is predicted on.
    chunk: tokens whose logits are in memory at once.
  """

  sequences: int = 16
  tokens: int = 64
  micro_batch: int = 8
  prompt_tokens: int = 16
  probe: int = 2
  chunk: int = 128


@dataclasses.dataclass(frozen=True)
class Row:
  """An optimizer, and the rank of what it keeps (None: it has none)."""

  optimizer: str
  rank: int | None

  @property
  def label(self) -> str:
    return self.optimizer + ("" if self.rank is None else f", rank {self.rank}")


def rows_of(names: Sequence[str], ranks: Sequence[int]) -> list[Row]:
  """What to time; the baseline comes first.

  Args:
    names: optimizers, each for all ranks, or for one as in `'galore:64'`.
    ranks: of those that have one.

  Raises:
    ValueError: an unknown optimizer, or no rank.
  """
  rows = [Row(BASELINE, None)]
  for text in names:
    name, _, rank = text.partition(":")
    if name not in optimizers.OPTIMIZERS:
      raise ValueError(
          f"optimizers={text!r} must be one of {sorted(optimizers.OPTIMIZERS)},"
          " or one of them with a rank, as 'galore:64'"
      )
    own = _ints("optimizers", [rank]) if rank else ranks
    if name in _WITHOUT_RANK:
      rows += [Row(name, None)] if name != BASELINE else []
      continue
    for one in own:
      if one < 1:
        raise ValueError(f"ranks={one} must be at least 1")
      rows.append(Row(name, one))
  return rows


def _ints(name: str, values: Sequence[str]) -> list[int]:
  try:
    return [int(value) for value in values]
  except ValueError as error:
    raise ValueError(f"{name}={','.join(values)!r}: {error}") from error


def config_of(row: Row, size: Size) -> ml_collections.ConfigDict:
  """The training config: the quickstart's, with LoGRA as published."""
  if size.sequences % size.micro_batch:
    raise ValueError(
        f"micro_batch={size.micro_batch} must divide"
        f" sequences={size.sequences}"
    )
  if not 0 < size.prompt_tokens < size.tokens:
    raise ValueError(
        f"prompt_tokens={size.prompt_tokens} must be at least 1 and leave some"
        f" of tokens={size.tokens} for the completion"
    )
  if not 0 < size.probe <= size.sequences:
    raise ValueError(
        f"probe={size.probe} must be at least 1 and at most"
        f" sequences={size.sequences}"
    )
  c = quickstart.get_config()
  # One response to a prompt: each row has all its tokens.
  c.rollout.prompts, c.rollout.responses = size.sequences, 1
  c.rollout.max_prompt_tokens = size.prompt_tokens
  c.rollout.max_new_tokens = size.tokens - size.prompt_tokens
  c.loss.row_tokens, c.loss.micro_rows = (size.tokens,), size.micro_batch
  c.loss.chunk = size.chunk
  c.optimizer.name = row.optimizer
  c.optimizer.rank = row.rank or 1
  if row.optimizer == "logra":
    # As published: a new basis for each update, so no momentum.
    c.optimizer.momentum, c.optimizer.refresh = 0.0, True
  c.kl.probe_responses = size.probe
  c.kl.measure = False
  return c


def random_batch(
    config: ml_collections.ConfigDict, vocab_size: int, seed: int
) -> train_step.Batch:
  """Random tokens without padding, random advantages."""
  rng = np.random.default_rng(seed)
  n = config.rollout.prompts * config.rollout.responses
  n_prompt = config.rollout.max_prompt_tokens
  length = n_prompt + config.rollout.max_new_tokens
  completion = np.broadcast_to(np.arange(length) >= n_prompt, (n, length))
  # Far from what a random model gives, if anywhere: nothing is clipped away.
  log_probs = np.where(completion, -np.log(vocab_size), 0.0)
  rollout = Rollout(
      tokens=rng.integers(vocab_size, size=(n, length), dtype=np.int32),
      valid=np.ones((n, length), bool),
      completion_mask=completion,
      log_probs=log_probs.astype(np.float32),
      finished=np.ones((n,), bool),
  )
  batch, _ = batches.make_batch(config, rollout, rng.standard_normal(n))
  return dataclasses.replace(batch, count=None)  # All rows are full.


class Update:
  """A compiled update and the state it goes on from."""

  def __init__(
      self, row: Row, size: Size, architecture: DecoderConfig, seed: int
  ):
    self.row = row
    config = config_of(row, size)
    self._mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    model = Decoder(load.configure(architecture, config))
    tx = optimizers.make_optimizer(config)
    init = jax.jit(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32)))
    params = init(jax.random.key(seed))["params"]
    self._state = compiled_step.init_state(config, params, tx, self._mesh)
    self._batch = random_batch(config, architecture.vocab_size, seed)
    step = compiled_step.jit_update(model, tx, config, self._state, self._mesh)
    started = time.perf_counter()
    with jax.set_mesh(self._mesh):
      self._step = step.lower(self._state, self._batch).compile()
    self.compile_seconds = time.perf_counter() - started

  def run(self) -> tuple[float, float]:
    """Does one update; returns its seconds, and those of all cores together.

    Raises:
      FloatingPointError: the update was skipped.
    """
    started, cpu_started = time.perf_counter(), time.process_time()
    with jax.set_mesh(self._mesh):
      self._state, metrics = self._step(self._state, self._batch)
      jax.block_until_ready((self._state, metrics))
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    if metrics["kl/skipped"] or not np.isfinite(metrics["train/loss"]):
      raise FloatingPointError(f"{self.row.label}: the update was skipped")
    return seconds, cpu_seconds

  def memory(self) -> dict[str, int]:
    """Bytes, as the compiler states them."""
    sizes = compiled_step.sizes(self._step)
    return {key: sizes[key] for key in ("argument_bytes", "temporary_bytes")}


def measure(
    rows: Sequence[Row],
    size: Size,
    architecture: DecoderConfig,
    *,
    repeats: int,
    seed: int,
) -> list[dict[str, Any]]:
  """Times updates, one of every row in turn.

  Args:
    rows: what to time.
    size: of the update.
    architecture: of the model; its weights are random.
    repeats: updates of each row that are timed, after a first one, which is
      kept apart (GaLore decomposes all its gradients in it).
    seed: of weights and batch.

  Returns:
    A dict for each row, plain data.
  """
  updates, results = [], []
  for row in rows:
    update = Update(row, size, architecture, seed)
    first, _ = update.run()
    updates.append(update)
    results.append(
        {
            **dataclasses.asdict(row),
            "compile_seconds": round(update.compile_seconds, 3),
            "first_seconds": round(first, 4),
            **update.memory(),
            "seconds": [],
            "cpu_seconds": [],
        }
    )
    _say(
        f"{row.label}: compiled {update.compile_seconds:.0f} s,"
        f" first update {first:.2f} s"
    )
  for repeat in range(repeats):
    # There and back, so that no row always follows the same one.
    order = range(len(rows)) if repeat % 2 == 0 else range(len(rows))[::-1]
    for i in order:
      seconds, cpu_seconds = updates[i].run()
      results[i]["seconds"].append(round(seconds, 4))
      results[i]["cpu_seconds"].append(round(cpu_seconds, 4))
    _say(
        f"{repeat + 1} of {repeats}: "
        + " ".join(f"{result['seconds'][-1]:.2f}" for result in results)
    )
  return results


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
  """What the figures were measured on."""
  model = platform.processor()
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  if cpuinfo.is_file():
    lines = cpuinfo.read_text("utf-8").splitlines()
    names = [x.partition(":")[2] for x in lines if x.startswith("model name")]
    model = names[0].strip() if names else model
  return {
      "cpu": model,
      "cpus": len(os.sched_getaffinity(0)),
      "load_average": round(os.getloadavg()[0], 2),
      "device": jax.devices()[0].device_kind,
      "jax": jax.__version__,
      "python": platform.python_version(),
      "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def summarize(result: dict[str, Any], baseline: dict[str, Any]) -> dict:
  """Median and quartiles of a row's times, and ratios to the baseline's."""
  low, median, high = np.percentile(result["seconds"], [25, 50, 75])
  ratio = lambda key: float(np.median(result[key]) / np.median(baseline[key]))
  return {
      "median": float(median),
      "iqr": float(high - low),
      "ratio": ratio("seconds"),
      "cpu_ratio": ratio("cpu_seconds"),
  }


def table(found: dict[str, Any]) -> str:
  """A saved measurement as a Markdown table."""
  lines = [
      "| optimizer | median, s | IQR, s | of dense AdamW's | to reach | of its"
      " processor time | first update, s | temporaries, GiB |",
      "|---|---|---|---|---|---|---|---|",
  ]
  baseline = found["rows"][0]
  for result in found["rows"]:
    s = summarize(result, baseline)
    reach = (
        REACH.get(result["rank"]) if result["optimizer"] == "logra" else None
    )
    cells = [
        Row(result["optimizer"], result["rank"]).label,
        f"{s['median']:.2f}",
        f"{s['iqr']:.2f}",
        f"{s['ratio']:.2f}",
        "-" if reach is None else f"≤ {reach}",
        f"{s['cpu_ratio']:.2f}",
        f"{result['first_seconds']:.2f}",
        f"{result['temporary_bytes'] / 2**30:.2f}",
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def figure_of(found: dict[str, Any]) -> Any:
  """A saved measurement as bars: median, quartiles, and what to reach."""
  results, baseline = found["rows"], found["rows"][0]
  figure = run_plot.make_figure(8, 1.2 + 0.35 * len(results))
  axes = figure.subplots()
  for i, result in enumerate(results):
    at = np.percentile(result["seconds"], [25, 50, 75])
    logra = result["optimizer"] == "logra"
    axes.barh(i, at[1], color="tab:orange" if logra else "tab:blue")
    axes.plot(at[[0, 2]], [i, i], "k", linewidth=2)
    if logra and result["rank"] in REACH:
      reach = REACH[result["rank"]] * np.median(baseline["seconds"])
      axes.plot([reach, reach], [i - 0.45, i + 0.45], "r")
  labels = [Row(r["optimizer"], r["rank"]).label for r in results]
  axes.set_yticks(range(len(results)), labels)
  axes.invert_yaxis()
  size = Size(**found["size"])
  axes.set_title(
      f"{found['model']}, {size.sequences} sequences of {size.tokens} tokens,"
      f" {found['machine']['cpus']} cores"
  )
  axes.set_xlabel(
      "seconds an update (black: quartiles; red: to reach, of dense AdamW's)"
  )
  axes.grid(axis="x", alpha=0.3)
  return figure


@dataclasses.dataclass(frozen=True)
class Grid:
  """What `growth` varies, one axis at a time, around a base.

  Attributes:
    architecture: of the model.
    size: of the update.
    rank: of LoGRA.
    ranks: values of the axis `rank`, the base's among them or not.
    layers: of `layers`, in place of the architecture's.
    micro_batches: of `micro-batches`, each of the base's `micro_batch`.
    tokens: of `tokens`, in place of the size's; a quarter is the prompt.
  """

  architecture: DecoderConfig
  size: Size
  rank: int
  ranks: tuple[int, ...]
  layers: tuple[int, ...]
  micro_batches: tuple[int, ...]
  tokens: tuple[int, ...]


def grid_of(architecture: DecoderConfig) -> Grid:
  """The grid of `--growth`: a few layers and words of a model."""
  return Grid(
      dataclasses.replace(architecture, n_layers=4, vocab_size=8192),
      Size(sequences=8, micro_batch=4, tokens=64, prompt_tokens=16),
      rank=64,
      ranks=(16, 64, 128, 256),
      layers=(2, 4, 8),
      micro_batches=(1, 2, 4, 8),
      tokens=(64, 128, 256, 512),
  )


def growth(grid: Grid, *, repeats: int, seed: int) -> list[dict[str, Any]]:
  """Times LoGRA and the baseline over a grid.

  Args:
    grid: what to vary.
    repeats: timed updates at each point.
    seed: of weights and batch.

  Returns:
    Results as of `measure`, each with `axis` and `value`.
  """
  base, size = grid.architecture, grid.size
  points: list[tuple[str, int, Size, DecoderConfig]] = []
  for n in grid.layers:
    points.append(("layers", n, size, dataclasses.replace(base, n_layers=n)))
  for n in grid.micro_batches:
    more = dataclasses.replace(size, sequences=n * size.micro_batch)
    points.append(("micro-batches", n, more, base))
  for n in grid.tokens:
    longer = dataclasses.replace(size, tokens=n, prompt_tokens=n // 4)
    points.append(("tokens", n, longer, base))

  run = functools.partial(measure, repeats=repeats, seed=seed)
  pair = [Row(BASELINE, None), Row("logra", grid.rank)]
  others = [Row("logra", rank) for rank in grid.ranks if rank != grid.rank]
  dense, *of_ranks = run([*pair, *others], size, base)
  at_base = [dense, of_ranks[0]]
  results = []
  for logra in sorted(of_ranks, key=lambda result: result["rank"]):
    for result in (dense, logra):
      results.append({"axis": "rank", "value": logra["rank"], **result})
  for axis, value, its_size, architecture in points:
    is_base = (its_size, architecture) == (size, base)
    found = at_base if is_base else run(pair, its_size, architecture)
    results += [{"axis": axis, "value": value, **result} for result in found]
  return results


def growth_figure(results: Sequence[dict[str, Any]]) -> Any:
  """Results of `growth`: time to the left, temporaries to the right."""
  names = list(dict.fromkeys(result["axis"] for result in results))
  figure = run_plot.make_figure(11, 7)
  panels = figure.subplots(2, 2).reshape(-1)
  for axes, name in zip(panels, names, strict=True):
    memory = axes.twinx()
    for optimizer, color in ((BASELINE, "tab:blue"), ("logra", "tab:orange")):
      own = [
          r for r in results if (r["axis"], r["optimizer"]) == (name, optimizer)
      ]
      x = [r["value"] for r in own]
      seconds = [float(np.median(r["seconds"])) for r in own]
      mib = [r["temporary_bytes"] / 2**20 for r in own]
      axes.plot(x, seconds, "o-", color=color, label=f"{optimizer}, time")
      memory.plot(x, mib, "x--", color=color, label=f"{optimizer}, memory")
    axes.set(xlabel=name, ylabel="seconds an update")
    memory.set_ylabel("temporaries, MiB")
    axes.set_xticks(x)
    axes.set_ylim(bottom=0.0)
    memory.set_ylim(bottom=0.0)
    axes.grid(alpha=0.3)
  lines, labels = axes.get_legend_handles_labels()
  more_lines, more_labels = memory.get_legend_handles_labels()
  axes.legend(lines + more_lines, labels + more_labels, loc="upper left")
  return figure


def growth_table(results: Sequence[dict[str, Any]]) -> str:
  """Results of `growth` as a Markdown table."""
  lines = [
      "| axis | value | optimizer | median, s | temporaries, MiB |",
      "|---|---|---|---|---|",
  ]
  for r in results:
    lines.append(
        f"| {r['axis']} | {r['value']} | {r['optimizer']} |"
        f" {np.median(r['seconds']):.3f} | {r['temporary_bytes'] / 2**20:.1f} |"
    )
  return "\n".join(lines) + "\n"


# For tests: seconds, nearly all of it compilation.
SMALL = DecoderConfig(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=64,
    tied_head=True,
)
SMALL_GRID = Grid(
    SMALL,
    Size(sequences=4, micro_batch=2, tokens=8, prompt_tokens=2),
    rank=4,
    ranks=(4,),
    layers=(2,),
    micro_batches=(2,),
    tokens=(8, 16),
)


def run(values: dict[str, Any]) -> None:
  """Measures, prints tables and writes files, as the flags say.

  Raises:
    ValueError: a flag that no run could use.
  """
  rows = rows_of(values["optimizers"], _ints("ranks", values["ranks"]))
  if values["repeats"] < 1:
    raise ValueError(f"repeats={values['repeats']} must be at least 1")
  architecture = (
      SMALL if values["small"] else architectures.architecture(values["model"])
  )
  size = Size(**{f.name: values[f.name] for f in dataclasses.fields(Size)})
  config_of(rows[0], size)  # refuses what does not fit
  folder = pathlib.Path(values["out"]) if values["out"] else None
  if folder:
    folder.mkdir(parents=True, exist_ok=True)
  found = {
      "command": " ".join(
          ["python -m experiments.benchmarks.update_time", *sys.argv[1:]]
      ),
      "model": "small" if values["small"] else values["model"],
      "weights": "random",
      "seed": values["seed"],
      "machine": machine(),
  }
  repeats, seed = values["repeats"], values["seed"]
  if values["growth"]:
    grid = SMALL_GRID if values["small"] else grid_of(architecture)
    results = growth(grid, repeats=repeats, seed=seed)
    print(growth_table(results))
    if folder:
      found |= {"grid": dataclasses.asdict(grid), "rows": results}
      _write(folder, "growth", found, growth_table(results))
      growth_figure(results).savefig(folder / "growth.png", dpi=150)
    return
  results = measure(rows, size, architecture, repeats=repeats, seed=seed)
  found |= {"size": dataclasses.asdict(size), "rows": results}
  print(table(found))
  if folder:
    name = f"speed-{size.sequences}x{size.tokens}"
    _write(folder, name, found, table(found))
    figure_of(found).savefig(folder / f"{name}.png", dpi=150)


def _write(
    folder: pathlib.Path, name: str, found: dict[str, Any], text: str
) -> None:
  data = json.dumps(found, indent=1) + "\n"
  (folder / f"{name}.json").write_text(data, "utf-8")
  (folder / f"{name}.md").write_text(text, "utf-8")


def main(argv: Sequence[str]) -> None:
  del argv
  # Accelerators of this machine have no part in this.
  jax.config.update("jax_platforms", "cpu")
  values = flags.FLAGS.flag_values_dict()
  try:
    run(values)
  except (ValueError, ImportError, OSError) as error:
    sys.exit(f"error: {error}")


def _define_flags() -> None:
  # GaLore's first update decomposes every gradient: two minutes for a rank.
  names = ["dense_adam", "lora", "galore:64", "logra"]
  flags.DEFINE_string(
      "model", "smollm2-135m", "See experiments/models/architectures.py."
  )
  flags.DEFINE_list("optimizers", names, "Dense AdamW always is.")
  flags.DEFINE_list("ranks", ["16", "64", "256"], "Of those that have one.")
  for name, default in dataclasses.asdict(Size()).items():
    flags.DEFINE_integer(name, default, "See Size.")
  flags.DEFINE_integer("repeats", 5, "Timed updates of each optimizer.")
  flags.DEFINE_integer("seed", 0, "Of weights and batch.")
  flags.DEFINE_string("out", None, "Folder for JSON, tables and pictures.")
  flags.DEFINE_bool("growth", False, "How time and memory grow, instead.")
  flags.DEFINE_bool("small", False, "A model of a few thousand parameters.")


if __name__ == "__main__":
  _define_flags()
  app.run(main)
