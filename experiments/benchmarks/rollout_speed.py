"""Tokens per second of rollouts, compared with `transformers.generate`.

  python -m experiments.benchmarks.rollout_speed --out=docs/results/rollout

Both engines have the same float32 weights, the same prompts and the same number
of threads. They take turns in one process, so that other load on the machine
affects both alike; ratios are ratios of medians. PyTorch and transformers are
needed, which no extra of this project installs:

  pip install torch transformers

There are two workloads:

- `equal`: one batch of prompts, greedy decoding, all responses of the maximal
  length.
- `sentences`: four batches of prompts at temperature 1. A response ends with
  its first sentence, so that lengths differ. `transformers` decodes a batch
  until its longest response ends; our engine gives the slot of a finished
  response to the next one. Tokens after an end do not count.

Cost: about six minutes on two CPU cores; 3 GB of memory.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import tempfile
import time
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np
import optax

from experiments import _cli
from experiments.models import decoder, hf, load
from experiments.models.pretrained import Pretrained
from experiments.models.tokenizer import Tokenizer
from experiments.reporting import provenance
from experiments.rollouts import generate
from experiments.rollouts.sampling import Sampling

# Answers the prompts of a workload from a seed; returns the number of tokens.
Engine = Callable[[int], int]


class Workload(NamedTuple):
  """The prompts that engines answer, and how.

  Attributes:
    inputs: Padded prompts `[B, P]` int32 and their mask `[B, P]` bool.
    sampling: How tokens are chosen, and how many at most.
    eos_ids: Ids of tokens that end a response.
    slots: Responses decoded at once.
  """

  inputs: tuple[np.ndarray, np.ndarray]
  sampling: Sampling
  eos_ids: Sequence[int]
  slots: int


def prompts(
    tokenizer: Tokenizer, n: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """`n` different chats, padded to `[n, length]`, and their mask."""
  chats = [
      [{"role": "user", "content": f"Tell me a story about the number {i}."}]
      for i in range(n)
  ]
  ids = [tokenizer.encode(tokenizer.apply_chat(chat)) for chat in chats]
  return generate.pad_prompts(ids, length, tokenizer.pad_id)


def sentence_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
  """Ids of the tokens that end a sentence, a line or the turn."""
  pieces = tokenizer.token_bytes()
  ends = [i for i, x in enumerate(pieces) if x.endswith((b".", b"!", b"\n"))]
  return tuple(sorted({*ends, *tokenizer.eos_ids}))


def our_engine(
    model: decoder.Decoder, params: optax.Params, workload: Workload
) -> Engine:
  """This project's engine, `generate.generate`."""

  def run(seed: int) -> int:
    rollout = generate.generate(
        model,
        params,
        *workload.inputs,
        jax.random.key(seed),
        sampling=workload.sampling,
        eos_ids=workload.eos_ids,
        pad_id=0,
        slots=workload.slots,
    )
    return int(np.sum(rollout.completion_mask))

  return run


def transformers_engine(torch: Any, model: Any, workload: Workload) -> Engine:
  """`transformers.generate`, on `workload.slots` prompts at a time.

  Args:
    torch: The module `torch`.
    model: A causal language model of transformers.
    workload: What to answer.
  """
  tokens, valid = (torch.from_numpy(x) for x in workload.inputs)
  sampling, eos_ids = workload.sampling, workload.eos_ids
  options: dict[str, Any] = {"do_sample": False}
  if not sampling.greedy:
    options = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
  if eos_ids:
    options["eos_token_id"] = list(eos_ids)
  else:
    options["min_new_tokens"] = sampling.max_new_tokens

  def run(seed: int) -> int:
    torch.manual_seed(seed)
    total = 0
    for start in range(0, len(tokens), workload.slots):
      part = slice(start, start + workload.slots)
      generated = model.generate(
          tokens[part].long(),
          attention_mask=valid[part].long(),
          max_new_tokens=sampling.max_new_tokens,
          pad_token_id=0,
          **options,
      )
      total += count_tokens(generated[:, tokens.shape[1] :].numpy(), eos_ids)
    return total

  return run


def count_tokens(tokens: np.ndarray, eos_ids: Sequence[int]) -> int:
  """Counts the tokens of responses `[B, C]` through the first end of each."""
  is_end = np.isin(tokens, eos_ids).astype(np.int64)
  return int(np.sum(np.cumsum(is_end, axis=1) - is_end == 0))


def time_engines(
    engines: Mapping[str, Engine], repeats: int
) -> dict[str, list[dict[str, float]]]:
  """Times the engines in turn.

  Args:
    engines: Engines by name.
    repeats: Timed rounds; a first round, which compiles, is not timed.

  Returns:
    By engine, one dict per round: `tokens`, `seconds`, `processor_seconds` of
    all threads, and the machine's `load`.
  """
  rows: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
  for repeat in range(1 + repeats):
    for name, run in engines.items():
      wall, cpu = time.perf_counter(), time.process_time()
      tokens = run(repeat)
      wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
      print(
          f"{name} {repeat}: {tokens} tokens, {wall:.2f} s, processor {cpu:.2f}"
          f" s, {tokens / wall:.1f} tokens/s, load {os.getloadavg()[0]:.1f}",
          flush=True,
      )
      if repeat:
        rows[name].append(
            {
                "tokens": tokens,
                "seconds": round(wall, 3),
                "processor_seconds": round(cpu, 3),
                "load": round(os.getloadavg()[0], 2),
            }
        )
  return rows


def summarize_workload(
    name: str, rows: Mapping[str, Sequence[Mapping[str, float]]]
) -> dict[str, Any]:
  """Medians of tokens per second, and the ratio of ours to transformers'.

  Both are also given per second of processor time, summed over all threads.
  On a machine with other load that is the steadier measure, but only for one
  thread: PyTorch's threads wait for each other in busy loops.

  Args:
    name: The workload's name.
    rows: Rounds of `time_engines`, of the engines `ours` and `transformers`.
  """
  row: dict[str, Any] = {"workload": name}
  for unit, suffix in (("seconds", ""), ("processor_seconds", "_of_processor")):
    rates = {
        engine: float(np.median([r["tokens"] / r[unit] for r in runs]))
        for engine, runs in rows.items()
    }
    row["tokens_per_second" + suffix] = {
        engine: round(rate, 1) for engine, rate in rates.items()
    }
    ratio = rates["ours"] / rates["transformers"]
    row["ratio" + suffix] = round(ratio, 3)
  return row | {"runs": rows}


def _workloads(
    values: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, Workload]:
  """The workloads that the flags select, by name."""
  batch, length, new = values["batch"], values["prompt"], values["new"]
  of_kind = {
      "equal": (batch, Sampling(new, temperature=0.0), ()),
      "sentences": (4 * batch, Sampling(new), sentence_ends(tokenizer)),
  }
  workloads = {}
  for name in values["workloads"]:
    if name not in of_kind:
      raise ValueError(f"workloads={name!r} must be one of {sorted(of_kind)}")
    n, sampling, eos_ids = of_kind[name]
    inputs = prompts(tokenizer, n, length)
    workloads[name] = Workload(inputs, sampling, eos_ids, batch)
  return workloads


def _as_transformers(transformers: Any, torch: Any, loaded: Pretrained) -> Any:
  """The same model as a module of transformers."""
  with tempfile.TemporaryDirectory() as folder:
    hf.save(folder, loaded.config, loaded.params, loaded.tokenizer)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()


def run(values: Mapping[str, Any]) -> None:
  """Measures and writes `throughput.json`.

  Args:
    values: Values of the flags by name.

  Raises:
    ImportError: PyTorch or transformers is not installed.
  """
  try:
    import torch
    import transformers
  except ModuleNotFoundError as error:
    raise ImportError(
        f"{error.name!r} is needed here: pip install torch transformers"
    ) from error
  loaded = load.from_path(values["model"])
  model = decoder.Decoder(loaded.config)
  threads = len(os.sched_getaffinity(0))
  torch.set_num_threads(threads)
  their_model = _as_transformers(transformers, torch, loaded)
  rows = []
  for name, workload in _workloads(values, loaded.tokenizer).items():
    print(f"== {name}")
    rounds = time_engines(
        {
            "ours": our_engine(model, loaded.params, workload),
            "transformers": transformers_engine(torch, their_model, workload),
        },
        values["repeats"],
    )
    rows.append(summarize_workload(name, rounds))
    print({k: x for k, x in rows[-1].items() if k != "runs"}, flush=True)
  content = {
      "command": provenance.command(),
      "machine": provenance.machine(),
      "threads": threads,
      "versions": provenance.versions(("jax", "torch", "transformers")),
      "batch": values["batch"],
      "prompt_tokens": values["prompt"],
      "max_new_tokens": values["new"],
      "rows": rows,
  }
  out = pathlib.Path(values["out"])
  out.mkdir(parents=True, exist_ok=True)
  (out / "throughput.json").write_text(json.dumps(content, indent=2) + "\n")


def main(values: flags.FlagValues) -> None:
  # Both engines run on the CPU, whatever accelerators the machine has.
  jax.config.update("jax_platforms", "cpu")
  run(values.flag_values_dict())


def _define_flags() -> None:
  path = ".cache/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
  flags.DEFINE_string("model", path, "Hugging Face directory or .gguf file.")
  flags.DEFINE_list(
      "workloads", ["equal", "sentences"], "What to time: equal, sentences."
  )
  flags.DEFINE_integer("batch", 32, "Responses decoded at once.")
  flags.DEFINE_integer("prompt", 64, "Padded length of a prompt in tokens.")
  flags.DEFINE_integer("new", 64, "Maximal length of a response in tokens.")
  flags.DEFINE_integer("repeats", 5, "Timed rounds.")
  flags.DEFINE_string("out", "docs/results/rollout", "Folder for the results.")


if __name__ == "__main__":
  _define_flags()
  _cli.run(main)
