"""Tokens per second of rollouts, beside `transformers.generate`.

  python -m experiments.benchmarks.rollout_speed --out=docs/results/rollout

Both engines have the same weights in float32, the same prompts and the same
number of threads, and run in one process, one after the other in turn, so that
what else the machine does falls on both; ratios are of medians. Needs PyTorch
and transformers, which are not among this project's extras:

  pip install torch transformers

Two workloads:

- `equal`: a batch of prompts, greedily, each response of as many tokens as
  allowed.
- `sentences`: four batches of prompts, at temperature 1; a response ends with
  its first sentence, so that lengths differ. `transformers` decodes a batch
  until its longest response ends; we give the slot of a response that has ended
  to the next one. Tokens after an end do not count.

Cost: about six minutes on two CPU cores; 3 GB of memory.
"""

from collections.abc import Callable, Sequence
import json
import os
import pathlib
import platform
import sys
import tempfile
import time
from typing import Any

from absl import app, flags
import jax
import numpy as np

from experiments.models import decoder, hf, load
from experiments.models.tokenizer import Tokenizer
from experiments.rollouts import generate
from experiments.rollouts.sampling import Sampling

# What a workload's engine takes: a seed; it returns how many tokens it made.
Engine = Callable[[int], int]


def prompts(
    tokenizer: Tokenizer, n: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Padded chats `[n, length]`, each about another number."""
  chats = [
      [{"role": "user", "content": f"Tell me a story about the number {i}."}]
      for i in range(n)
  ]
  ids = [tokenizer.encode(tokenizer.apply_chat(chat)) for chat in chats]
  return generate.pad_prompts(ids, length, tokenizer.pad_id)


def sentence_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
  """Ids of tokens that end a sentence or the turn."""
  pieces = tokenizer.token_bytes()
  ends = [i for i, x in enumerate(pieces) if x.endswith((b".", b"!", b"\n"))]
  return tuple(sorted({*ends, *tokenizer.eos_ids}))


def ours(
    model: decoder.Decoder,
    params: Any,
    inputs: tuple[np.ndarray, np.ndarray],
    sampling: Sampling,
    eos_ids: Sequence[int],
    slots: int,
) -> Engine:
  """Our engine."""

  def run(seed: int) -> int:
    found = generate.generate(
        model,
        params,
        *inputs,
        jax.random.key(seed),
        sampling=sampling,
        eos_ids=eos_ids,
        pad_id=0,
        slots=slots,
    )
    return int(np.sum(found.completion_mask))

  return run


def theirs(
    torch: Any,
    model: Any,
    inputs: tuple[np.ndarray, np.ndarray],
    sampling: Sampling,
    eos_ids: Sequence[int],
    slots: int,
) -> Engine:
  """`transformers.generate`, `slots` prompts at a time."""
  tokens, valid = (torch.from_numpy(x) for x in inputs)
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
    for start in range(0, len(tokens), slots):
      part = slice(start, start + slots)
      found = model.generate(
          tokens[part].long(),
          attention_mask=valid[part].long(),
          max_new_tokens=sampling.max_new_tokens,
          pad_token_id=0,
          **options,
      )
      total += count(found[:, tokens.shape[1] :].numpy(), eos_ids)
    return total

  return run


def count(tokens: np.ndarray, eos_ids: Sequence[int]) -> int:
  """Generated tokens of `[B, C]` up to the first end, the end included."""
  is_end = np.isin(tokens, eos_ids).astype(np.int64)
  return int(np.sum(np.cumsum(is_end, axis=1) - is_end == 0))


def measure(
    engines: dict[str, Engine], repeats: int
) -> dict[str, list[dict[str, float]]]:
  """Runs the engines in turn; the first round, which compiles, is not kept."""
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


def summarise(
    name: str, rows: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
  """A workload's row: medians of tokens per second, and their ratio.

  Also by the processor time of all threads, the steadier of the two on a
  machine that does other things; not with several threads, though: PyTorch's
  wait for each other in a loop.
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


def run(values: dict[str, Any]) -> None:
  """Measures and writes `throughput.json`."""
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
  with tempfile.TemporaryDirectory() as folder:
    hf.save(folder, loaded.config, loaded.params, loaded.tokenizer)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
  batch, length, new = values["batch"], values["prompt"], values["new"]
  sentences = sentence_ends(loaded.tokenizer)
  workloads = {
      "equal": (batch, Sampling(new, temperature=0.0), ()),
      "sentences": (4 * batch, Sampling(new), sentences),
  }
  rows = []
  for name in values["workloads"]:
    n, sampling, eos_ids = workloads[name]
    inputs = prompts(loaded.tokenizer, n, length)
    args = (inputs, sampling, eos_ids, batch)
    print(f"== {name}")
    found = measure(
        {
            "ours": ours(model, loaded.params, *args),
            "transformers": theirs(torch, other, *args),
        },
        values["repeats"],
    )
    rows.append(summarise(name, found))
    print({k: x for k, x in rows[-1].items() if k != "runs"}, flush=True)
  out = pathlib.Path(values["out"])
  out.mkdir(parents=True, exist_ok=True)
  content = {
      "command": " ".join(
          ["python -m experiments.benchmarks.rollout_speed", *sys.argv[1:]]
      ),
      "machine": f"{platform.machine()}, {threads} cores",
      "threads": threads,
      "versions": {
          "python": platform.python_version(),
          "jax": jax.__version__,
          "torch": torch.__version__,
          "transformers": transformers.__version__,
      },
      "batch": batch,
      "prompt_tokens": length,
      "max_new_tokens": new,
      "rows": rows,
  }
  (out / "throughput.json").write_text(json.dumps(content, indent=2) + "\n")


def main(argv: Sequence[str]) -> None:
  del argv
  jax.config.update("jax_platforms", "cpu")
  try:
    run(flags.FLAGS.flag_values_dict())
  except (ValueError, ImportError, OSError) as error:
    sys.exit(f"error: {error}")


def _define_flags() -> None:
  path = ".cache/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
  flags.DEFINE_string("model", path, "Hugging Face directory or .gguf file.")
  flags.DEFINE_list("workloads", ["equal", "sentences"], "See above.")
  flags.DEFINE_integer("batch", 32, "Responses decoded at once.")
  flags.DEFINE_integer("prompt", 64, "Padded length of a prompt in tokens.")
  flags.DEFINE_integer("new", 64, "Limit of a response in tokens.")
  flags.DEFINE_integer("repeats", 5, "Timed rounds.")
  flags.DEFINE_string("out", "docs/results/rollout", "Folder for the results.")


if __name__ == "__main__":
  _define_flags()
  app.run(main)
