"""Compares what a GPU measures with what its compiler and the planner say.

  python -m experiments.benchmarks.gpu_check

Runs on any NVIDIA GPU with 40 GB or more, with the extras `train` and `cuda`
and random weights; nothing is downloaded. It ends within `--budget` seconds
(450). Every section is a process of its own, because JAX reports only the
highest memory that a process ever had. An error, or the end of the budget,
affects that section alone. Results are written to
`docs/results/device/<card>.json` (or `--out`) after every section; commit that
file.

Sections, the most informative ones first:
- updates of one sequence of 2,048 tokens at the shapes of Qwen2.5 1.5B and 7B,
  with the KL probe: LoGRA of rank 16, 64 and 256 with bfloat16 weights, and
  dense AdamW with float32 weights where it fits. Each gives the peak of memory
  and the seconds per update, after a first update that is not timed;
- rollouts of 64 responses of 256 tokens to 8 prompts of 128: tokens per second;
- meanwhile, on the CPU, `experiments.plan` for the same updates on h100:1.

Expect "measured / planned" between 0.95 and 1.05. The planner's figure is
arguments + outputs - aliased + temporaries of the program compiled without a
GPU; "compiled" is the same sum of the program that ran. The three can differ
because the card's compiler times its kernels and can choose others, or because
the card is of another kind. A "≤" before a measured peak means that the process
reached it before its first update (while compiling or drawing the weights), so
the update's own peak is at most that. If the budget ends the run early, the
last sections are missing.

`--small` runs all of it on any machine, at the sizes of the tests.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags
import numpy as np

from experiments import _cli
from experiments.benchmarks import gpu_sections
from experiments.benchmarks.gpu_sections import Section
from experiments.reporting import provenance, tables, units

_FOLDER = pathlib.Path("docs/results/device")
# Seconds of the budget that must be left for a section to start.
_LEAST_SECONDS = 10.0
_NOT_STARTED = "not started before the budget ended"
# Allocates memory only as it is needed, and up to nearly all of it, so that the
# peak is the program's own.
_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
}
# A Hugging Face config.json of a model without weights, also for tests.
SMALL_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256,
}


def sections() -> list[Section]:
  """All sections, the most informative ones first."""
  small, large = "qwen2.5-1.5b", "qwen2.5-7b"
  update = lambda model, rank: Section("update", model, rank=rank)
  dense = lambda model: Section("update", model, "dense_adam")
  rollouts = lambda model: Section("rollout", model, tokens=256, repeats=2)
  return [
      update(small, 256),
      update(large, 16),
      dense(small),
      rollouts(large),
      rollouts(small),
      update(small, 16),
      update(small, 64),
      update(large, 256),
      update(large, 64),
      dense(large),
  ]


def small_sections(folder: str) -> list[Section]:
  """Sections that run on any machine, for tests.

  Args:
    folder: Folder that the model's `config.json` is written to.
  """
  file = pathlib.Path(folder) / "config.json"
  file.write_text(json.dumps(SMALL_MODEL), "utf-8")
  update = Section("update", folder, rank=8, tokens=64, repeats=2)
  return [
      update,
      dataclasses.replace(update, optimizer="dense_adam"),
      Section(
          "rollout",
          folder,
          prompts=2,
          prompt_tokens=8,
          responses=2,
          tokens=8,
          repeats=1,
      ),
  ]


def run_process(
    command: Sequence[str], timeout: float, env: Mapping[str, str]
) -> dict[str, Any]:
  """Runs a process that reports its results as lines of JSON.

  Args:
    command: What to run. Each line of JSON replaces the one before.
    timeout: Seconds after which the process is killed.
    env: Environment variables in addition to this process's.

  Returns:
    The last line of JSON, with `error` if the process failed or was killed.
  """
  error = ""
  with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
    try:
      code = subprocess.run(
          command,
          stdin=subprocess.DEVNULL,
          stdout=out,
          stderr=err,
          env={**os.environ, **env},
          timeout=timeout,
          check=False,
      ).returncode
    except subprocess.TimeoutExpired:
      code, error = 0, "stopped when the budget ended"
    out.seek(0)
    err.seek(0)
    lines = [line for line in out if line.startswith("{")]
    if code:
      last = (err.read().strip().splitlines() or [""])[-1]
      error = f"exit status {code}: {last[:500]}"
  result: dict[str, Any] = {}
  for line in lines[-2:]:  # The last line can be incomplete.
    try:
      result = json.loads(line)
    except json.JSONDecodeError:
      pass
  return {**result, "error": error} if error else result


def _plan(
    section: Section, target: str, left: Callable[[], float]
) -> dict[str, Any]:
  """Plans a section's update on the CPU; `left` gives the seconds left."""
  if left() < _LEAST_SECONDS:
    return {"error": _NOT_STARTED}
  request = gpu_sections.request_of(section, target)
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "plan.json"
    command = [
        *(sys.executable, "-m", "experiments.plan", f"--out={file}"),
        *(f"--model={request.model}", f"--target={target}"),
        *(f"--optimizer={request.optimizer}", f"--rank={request.rank}"),
        f"--tokens={request.tokens}",
    ]
    result = run_process(command, left(), {"JAX_PLATFORMS": "cpu"})
    if not file.is_file() or not file.stat().st_size:
      return {"error": result.get("error", "the planner wrote nothing")}
    return json.loads(file.read_text("utf-8"))


def run_sections(
    sections_to_run: Sequence[Section],
    *,
    target: str,
    budget: float,
    out: str | None = None,
) -> dict[str, Any]:
  """Runs sections one after another, and the planner at the same time.

  Args:
    sections_to_run: The sections, in order.
    target: Target of the planner.
    budget: Seconds for everything.
    out: File that is written after every section; None means
      `docs/results/device/<card>.json`.

  Returns:
    The content of the file.
  """
  end = time.monotonic() + budget
  left = lambda: end - time.monotonic()
  results: dict[str, Any] = {
      "command": provenance.command(),
      "budget_seconds": budget,
      "target": target,
      "sections": [],
  }
  with futures.ThreadPoolExecutor(1) as planner:
    plans = {
        section: planner.submit(_plan, section, target, left)
        for section in sections_to_run
        if section.kind == "update"
    }
    for section in sections_to_run:
      entry = {**dataclasses.asdict(section), "label": section.label}
      results["sections"].append(entry)
      if left() < _LEAST_SECONDS:
        entry["error"] = _NOT_STARTED
      else:
        entry |= _run_section(section, left())
      text = f"{section.label}: {_outcome(entry)}"
      print(text, file=sys.stderr, flush=True)
      _save(results, plans, out)
    futures.wait(plans.values(), timeout=max(0.0, left()))
    for plan in plans.values():
      plan.cancel()
  _save(results, plans, out)
  return results


def _run_section(section: Section, timeout: float) -> dict[str, Any]:
  """Runs a section in a process of its own."""
  job = json.dumps(dataclasses.asdict(section))
  command = [
      *(sys.executable, "-m", "experiments.benchmarks.gpu_check"),
      *(f"--job={job}", "--traceback"),
  ]
  started = time.monotonic()
  result = run_process(command, timeout, _ENVIRONMENT)
  return result | {"wall_seconds": round(time.monotonic() - started, 1)}


def _save(
    results: dict[str, Any],
    plans: Mapping[Section, futures.Future[dict[str, Any]]],
    out: str | None,
) -> None:
  """Writes the results so far, with the plans that are ready."""
  for entry in results["sections"]:
    section = Section(
        **{f.name: entry[f.name] for f in dataclasses.fields(Section)}
    )
    plan = plans.get(section)
    if plan is not None and plan.done() and not plan.cancelled():
      entry["plan"] = plan.result()
    device = entry.pop("device", None)
    results["device"] = results.get("device") or device
  kind = (results["device"] or {"kind": "unknown"})["kind"]
  name = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
  file = pathlib.Path(out) if out else _FOLDER / f"{name}.json"
  file.parent.mkdir(parents=True, exist_ok=True)
  new = file.with_suffix(".partial")
  new.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
  new.replace(file)


def _outcome(entry: Mapping[str, Any]) -> str:
  """How a section ended, in a few words."""
  if "error" in entry:
    return entry["error"]
  if "skipped" in entry:
    return f"does not fit: {entry['skipped']}"
  if "tokens_per_second" in entry:
    return f"{entry['tokens_per_second']:.0f} tokens/s"
  if entry.get("seconds"):
    return f"{np.median(entry['seconds']):.3f} s"
  return "it reported nothing"


def device_table(results: Mapping[str, Any]) -> str:
  """Results of `run_sections` as a Markdown table with remarks below."""
  head = [
      "",
      "measured peak, GiB",
      "compiled",
      "planned",
      "measured / compiled",
      "measured / planned",
      "update, s",
      "of dense AdamW's",
      "tokens/s",
      "",
  ]
  dense_seconds = {
      entry["model"]: float(np.median(entry["seconds"]))
      for entry in results["sections"]
      if entry["optimizer"] == "dense_adam" and entry.get("seconds")
  }
  lines = [_cells(entry, dense_seconds) for entry in results["sections"]]
  text = tables.markdown(head, lines)
  differences = [
      abs(entry["peak_bytes"] / entry["plan"]["peak_bytes"] - 1)
      for entry in results["sections"]
      if _own_peak(entry) and entry.get("plan", {}).get("peak_bytes")
  ]
  if differences:
    text += (
        "\nA measured peak differs from the planned one by"
        f" {100 * max(differences):.1f} % at most; up to 5 % is expected.\n"
    )
  device = results.get("device")
  if device and device["memory_limit"] is None:
    text += f"\nNo memory_stats on {device['platform']}: no measured peak.\n"
  return text


def _cells(
    entry: Mapping[str, Any], dense_seconds: Mapping[str, float]
) -> list[str]:
  """One row of the table; `dense_seconds` gives dense AdamW's by model."""
  peak, compiled = entry.get("peak_bytes"), entry.get("compiled_peak_bytes")
  planned = entry.get("plan", {}).get("peak_bytes")
  is_update = entry["kind"] == "update"
  seconds = None
  if is_update and entry.get("seconds"):
    seconds = float(np.median(entry["seconds"]))
  is_bound = is_update and peak and not _own_peak(entry)
  return [
      entry["label"],
      ("≤ " if is_bound else "") + _number(peak, units.GIB),
      _number(compiled, units.GIB),
      _number(planned, units.GIB),
      _number(peak, compiled),
      _number(peak, planned),
      _number(seconds),
      _number(seconds, dense_seconds.get(entry["model"])),
      _number(entry.get("tokens_per_second")),
      _note(entry),
  ]


def _own_peak(entry: Mapping[str, Any]) -> bool:
  """Whether the peak was reached in the updates and not before them."""
  before = entry.get("peak_bytes_before")
  return before is not None and before < (entry.get("peak_bytes") or 0)


def _note(entry: Mapping[str, Any]) -> str:
  """Says what went wrong, if anything."""
  notes = []
  if "error" in entry or not entry.get("seconds"):
    notes.append(_outcome(entry))
  if "error" in entry.get("plan", {}):
    notes.append(f"planner: {entry['plan']['error']}")
  return "; ".join(notes)


def _number(value: float | None, unit: float | None = 1.0) -> str:
  """`value / unit` as an entry; a dash where one of the two is missing."""
  if value is None or not unit:
    return "-"
  ratio = value / unit
  return f"{ratio:.3f}" if ratio < 100 else f"{ratio:.0f}"


def main(values: flags.FlagValues) -> None:
  if values.job is not None:
    tell = lambda result: print(json.dumps(result), flush=True)
    section = Section(**json.loads(values.job))
    tell(gpu_sections.run_section(section, tell))
    return
  if values.budget <= 0:
    raise ValueError(f"budget={values.budget} must be more than 0 seconds")
  if values.small:
    with tempfile.TemporaryDirectory(prefix="small-") as folder:
      results = run_sections(
          small_sections(folder),
          target="cpu:1",
          budget=values.budget,
          out=values.out,
      )
  else:
    results = run_sections(
        sections(), target="h100:1", budget=values.budget, out=values.out
    )
  print(device_table(results))
  if not any(entry.get("seconds") for entry in results["sections"]):
    raise _cli.UserError(
        "no section finished; the table says why, and a larger --budget leaves"
        " more time"
    )


def _define_flags() -> None:
  flags.DEFINE_float("budget", 450.0, "Seconds for everything.")
  flags.DEFINE_string(
      "out", None, "JSON file; by default docs/results/device/<card>.json."
  )
  flags.DEFINE_bool("small", False, "Run at the sizes of tests, anywhere.")
  flags.DEFINE_string(
      "job", None, "Internal: run this section, given as JSON, and report it."
  )


if __name__ == "__main__":
  _define_flags()
  _cli.run(main)
