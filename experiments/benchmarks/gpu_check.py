"""What a GPU measures, beside what its compiler and the planner said.

  python -m experiments.benchmarks.gpu_check

Any one NVIDIA GPU with 40 GB or more, the extras `train` and `cuda`, random
weights, nothing downloaded. It ends within `--budget` seconds (450). Every
section is a process of its own, because JAX tells only the highest memory that
a process ever had; an error, or the end of the budget, costs that section
alone. What is done is in `docs/results/device/<card>.json` at once (or in
`--out`): commit that file.

Sections, the most telling ones first:
- updates of one sequence of 2,048 tokens at the shapes of Qwen2.5 1.5B and 7B,
  KL probe on, LoGRA of rank 16, 64 and 256 with bfloat16 weights, and dense
  AdamW with float32 weights where it fits: the peak of memory and seconds per
  update, after a first update that is not timed;
- rollouts of 64 responses of 256 tokens to 8 prompts of 128: tokens per second;
- beside them, on the CPU, `experiments.plan` for the same updates on h100:1.

What to expect: "measured / planned" from 0.95 to 1.05. The planner's figure is
arguments + outputs - aliased + temporaries of the program compiled without a
GPU; "compiled" is the same sum of the program that ran. The card's compiler
times its kernels and may choose others; that, and a card of another kind, is
where the three may differ. A measured peak with "≤" in front is of the process
before its first update (compiling, drawing the weights), so the update's own is
at most this. If the budget ends the run early, the last sections are missing.

`--small` runs all of it on any machine, at sizes of tests.
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

from absl import app, flags
import numpy as np

from experiments.benchmarks.gpu_sections import Section, measure, request_of

_GIB = 2**30
_FOLDER = pathlib.Path("docs/results/device")
# No section is begun with less time than this, in seconds.
_LEAST = 10.0
# A GPU's memory is taken as it is needed, to the last: what is asked is the
# peak.
_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
}
# Of tests too: a Hugging Face config.json without weights.
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
  """All sections, the most telling ones first."""
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
  """As `sections`, for tests.

  Args:
    folder: where the model's `config.json` is written.
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
  """Runs a section's process.

  Args:
    command: what to run; it writes JSON lines, the last of which counts.
    timeout: seconds after which it is ended.
    env: environment variables besides this process's.

  Returns:
    The last line of JSON, with `error` if the process did not end well.
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
      code, error = 0, "the budget ended it"
    out.seek(0)
    err.seek(0)
    lines = [line for line in out if line.startswith("{")]
    if code:
      said = err.read().strip().splitlines() or [""]
      error = f"exit status {code}: {said[-1][:500]}"
  found: dict[str, Any] = {}
  for line in lines[-2:]:  # The last one may be cut off.
    try:
      found = json.loads(line)
    except json.JSONDecodeError:
      pass
  return {**found, "error": error} if error else found


def _plan(
    section: Section, target: str, left: Callable[[], float]
) -> dict[str, Any]:
  """The planner's figures for a section's update; a CPU makes them."""
  if left() < _LEAST:
    return {"error": "the budget ended before it"}
  r = request_of(section, target)
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "plan.json"
    command = [
        *(sys.executable, "-m", "experiments.plan", f"--json={file}"),
        *(f"--model={r.model}", f"--target={target}", f"--rank={r.rank}"),
        *(f"--optimizer={r.optimizer}", f"--tokens={r.tokens}"),
    ]
    ended = run_process(command, left(), {"JAX_PLATFORMS": "cpu"})
    if not file.is_file() or not file.stat().st_size:
      return {"error": ended.get("error", "the planner wrote nothing")}
    return json.loads(file.read_text("utf-8"))


def check(
    todo: Sequence[Section],
    *,
    target: str,
    budget: float,
    out: str | None = None,
) -> dict[str, Any]:
  """Runs sections one after another, and the planner beside them.

  Args:
    todo: what to run.
    target: of the planner.
    budget: seconds for all.
    out: file that is written after every section; None means
      `docs/results/device/<card>.json`.

  Returns:
    What the file holds.
  """
  end = time.monotonic() + budget
  left = lambda: end - time.monotonic()
  found: dict[str, Any] = {
      "command": " ".join(
          ["python -m experiments.benchmarks.gpu_check", *sys.argv[1:]]
      ),
      "budget_seconds": budget,
      "target": target,
      "sections": [],
  }
  with futures.ThreadPoolExecutor(1) as beside:
    updates = [s for s in todo if s.kind == "update"]
    plans = {s: beside.submit(_plan, s, target, left) for s in updates}
    for section in todo:
      entry = {**dataclasses.asdict(section), "label": section.label}
      found["sections"].append(entry)
      if left() < _LEAST:
        entry["error"] = "the budget ended before it"
      else:
        job = json.dumps(dataclasses.asdict(section))
        command = [sys.executable, "-m", "experiments.benchmarks.gpu_check"]
        started = time.monotonic()
        entry |= run_process([*command, f"--job={job}"], left(), _ENVIRONMENT)
        entry["wall_seconds"] = round(time.monotonic() - started, 1)
      print(f"{section.label}: {_said(entry)}", file=sys.stderr, flush=True)
      _save(found, plans, out)
    futures.wait(plans.values(), timeout=max(0.0, left()))
    for plan in plans.values():
      plan.cancel()
  _save(found, plans, out)
  return found


def _save(
    found: dict[str, Any],
    plans: Mapping[Section, futures.Future[dict[str, Any]]],
    out: str | None,
) -> None:
  """Writes what there is, plans that are ready included."""
  for entry in found["sections"]:
    section = Section(**{f.name: entry[f.name] for f in _FIELDS})
    plan = plans.get(section)
    if plan is not None and plan.done() and not plan.cancelled():
      entry["plan"] = plan.result()
    device = entry.pop("device", None)
    found["device"] = found.get("device") or device
  kind = (found["device"] or {"kind": "unknown"})["kind"]
  name = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
  file = pathlib.Path(out) if out else _FOLDER / f"{name}.json"
  file.parent.mkdir(parents=True, exist_ok=True)
  new = file.with_suffix(".partial")
  new.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
  new.replace(file)


_FIELDS = dataclasses.fields(Section)


def _said(entry: Mapping[str, Any]) -> str:
  """The end of a section in a few words."""
  if "error" in entry:
    return entry["error"]
  if "skipped" in entry:
    return f"does not fit: {entry['skipped']}"
  if "tokens_per_second" in entry:
    return f"{entry['tokens_per_second']:.0f} tokens/s"
  if entry.get("seconds"):
    return f"{np.median(entry['seconds']):.3f} s"
  return "it said nothing"


def table(found: Mapping[str, Any]) -> str:
  """What `check` found, as a Markdown table."""
  dense = {
      entry["model"]: np.median(entry["seconds"])
      for entry in found["sections"]
      if entry["optimizer"] == "dense_adam" and entry.get("seconds")
  }
  lines = [
      "| | measured peak, GiB | compiled | planned | measured / compiled |"
      " measured / planned | update, s | of dense AdamW's | tokens/s | |",
      "|---|---|---|---|---|---|---|---|---|---|",
  ]
  for entry in found["sections"]:
    update = entry["kind"] == "update"
    peak, compiled = entry.get("peak_bytes"), entry.get("compiled_peak_bytes")
    planned = entry.get("plan", {}).get("peak_bytes")
    seconds = np.median(entry["seconds"]) if entry.get("seconds") else None
    cells = [
        entry["label"],
        ("≤ " if update and peak and not _own_peak(entry) else "")
        + _cell(peak, 1 / _GIB),
        _cell(compiled, 1 / _GIB),
        _cell(planned, 1 / _GIB),
        _cell(peak, 1 / compiled if compiled else None),
        _cell(peak, 1 / planned if planned else None),
        _cell(seconds if update else None),
        _cell(
            seconds if update else None,
            1 / dense[entry["model"]] if entry["model"] in dense else None,
        ),
        _cell(entry.get("tokens_per_second")),
        _note(entry),
    ]
    lines.append(f"| {' | '.join(cells)} |")
  differences = [
      abs(entry["peak_bytes"] / entry["plan"]["peak_bytes"] - 1)
      for entry in found["sections"]
      if _own_peak(entry) and entry.get("plan", {}).get("peak_bytes")
  ]
  if differences:
    lines += [
        "",
        "A measured peak differs from the planned one by"
        f" {100 * max(differences):.1f} % at most; it should by 5 %.",
    ]
  device = found.get("device")
  if device and device["memory_limit"] is None:
    lines += ["", f"No memory_stats on {device['platform']}: no measured peak."]
  return "\n".join(lines) + "\n"


def _own_peak(entry: Mapping[str, Any]) -> bool:
  """Whether the peak is of the updates, and not of what came before them."""
  before = entry.get("peak_bytes_before")
  return before is not None and before < (entry.get("peak_bytes") or 0)


def _note(entry: Mapping[str, Any]) -> str:
  """What went wrong."""
  notes = []
  if "error" in entry or not entry.get("seconds"):
    notes.append(_said(entry))
  if "error" in entry.get("plan", {}):
    notes.append(f"planner: {entry['plan']['error']}")
  return "; ".join(notes)


def _cell(value: float | None, scale: float | None = 1.0) -> str:
  """A number in a table; a dash where it, or what it is over, is missing."""
  if value is None or scale is None:
    return "-"
  return (
      f"{value * scale:.3f}" if value * scale < 100 else f"{value * scale:.0f}"
  )


def main(argv: Sequence[str]) -> None:
  del argv
  values = flags.FLAGS.flag_values_dict()
  if values["job"] is not None:
    tell = lambda found: print(json.dumps(found), flush=True)
    tell(measure(Section(**json.loads(values["job"])), tell))
    return
  if values["budget"] <= 0:
    sys.exit(f"error: budget={values['budget']} must be more than 0 seconds")
  options = {"budget": values["budget"], "out": values["out"]}
  if values["small"]:
    with tempfile.TemporaryDirectory(prefix="small-") as folder:
      found = check(small_sections(folder), target="cpu:1", **options)
  else:
    found = check(sections(), target="h100:1", **options)
  print(table(found))
  if not any(entry.get("seconds") for entry in found["sections"]):
    sys.exit("error: no section came to an end")


def _define_flags() -> None:
  flags.DEFINE_float("budget", 450.0, "Seconds for everything.")
  flags.DEFINE_string("out", None, "JSON; docs/results/device/<card>.json.")
  flags.DEFINE_bool("small", False, "Sizes of tests, on any machine.")
  flags.DEFINE_string("job", None, "A section, as JSON, in this process.")


if __name__ == "__main__":
  _define_flags()
  app.run(main)
