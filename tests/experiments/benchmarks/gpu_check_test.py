"""Tests of the check of a GPU, at small sizes and on a CPU."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import gpu_check, gpu_sections
from experiments.benchmarks.gpu_sections import Section
from experiments.models import architectures
from experiments.planning import request as request_lib
from experiments.reporting.units import GIB


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  # Nearly all of the time goes into compiling, in the sections' processes.
  monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def test_an_update_a_rollout_and_a_plan(tmp_path):
  todo = gpu_check.small_sections(str(tmp_path))
  todo = todo[1:]  # Dense AdamW's update compiles faster than LoGRA's.
  out = tmp_path / "results" / "card.json"
  results = gpu_check.run_sections(
      todo, target="cpu:1", budget=300.0, out=str(out)
  )
  assert json.loads(out.read_text()) == results
  update, rollout = results["sections"]
  assert "error" not in update and "error" not in update["plan"], results
  assert results["device"]["platform"] == "cpu"
  assert results["device"]["jax"] == jax.__version__
  assert len(update["seconds"]) == todo[0].repeats
  # The program that ran is the same as the one that the planner compiled.
  assert update["compiled_peak_bytes"] == update["plan"]["peak_bytes"]
  kinds = update["plan"]["arguments"]
  assert update["state_bytes"] == kinds["weights"] + kinds["optimizer"]
  assert np.isfinite(update["loss"]) and update["update_skipped"] == 0.0
  assert rollout["responses"] == 4
  assert rollout["tokens_per_second"] > 0
  text = gpu_check.device_table(results)
  assert "No memory_stats on cpu" in text


@pytest.mark.slow  # The test above runs the same in a process of its own.
def test_logra_in_this_process(tmp_path):
  section, *_ = gpu_check.small_sections(str(tmp_path))
  told = []
  result = gpu_sections.run_section(section, lambda x: told.append(dict(x)))
  assert len(result["seconds"]) == section.repeats
  # Weights in bfloat16, and hardly anything else.
  n = architectures.n_params(architectures.architecture(section.model))
  assert 2 * n < result["state_bytes"] < 1.05 * 2 * n
  assert [len(x.get("seconds", [])) for x in told[-2:]] == [1, 2]
  assert "compiled_peak_bytes" in told[1] and "loss" not in told[1]


def test_what_does_not_fit_is_not_run(monkeypatch, tmp_path):
  section = gpu_check.small_sections(str(tmp_path))[0]
  memory = {"bytes_limit": GIB // 2**14}
  monkeypatch.setattr(
      gpu_sections, "_memory", lambda device, key: memory.get(key)
  )
  result = gpu_sections.run_section(section, lambda x: None)
  assert result["skipped"] == "0.0 of 0.0 GiB"
  assert "compile_seconds" not in result


def test_out_of_memory_is_recorded(monkeypatch, tmp_path):
  def run(section, device, result, tell):
    result["compile_seconds"] = 1.0
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 GiB\nand more")

  monkeypatch.setattr(gpu_sections, "_update", run)
  section = gpu_check.small_sections(str(tmp_path))[0]
  result = gpu_sections.run_section(section, lambda x: None)
  assert result["error"] == "RESOURCE_EXHAUSTED: 3 GiB"
  assert result["compile_seconds"] == 1.0


def test_what_a_process_said_before_it_failed_is_kept():
  code = "print('{\"a\": 1}', flush=True); raise ValueError('too bad')"
  result = gpu_check.run_process([sys.executable, "-c", code], 60.0, {})
  assert result == {"a": 1, "error": "exit status 1: ValueError: too bad"}


def test_what_a_process_said_before_its_time_was_up_is_kept():
  code = """
import time
print('{"a": 1}\\n{"a": 2}\\n{"a": ', end='', flush=True)
time.sleep(60)
"""
  result = gpu_check.run_process([sys.executable, "-c", code], 2.0, {})
  assert result == {"a": 2, "error": "stopped when the budget ended"}


def test_without_time_nothing_is_run(tmp_path):
  out = tmp_path / "card.json"
  todo = gpu_check.sections()
  results = gpu_check.run_sections(
      todo, target="h100:1", budget=1.0, out=str(out)
  )
  errors = {entry["error"] for entry in results["sections"]}
  assert errors == {"not started before the budget ended"}
  assert len(json.loads(out.read_text())["sections"]) == len(todo)


def test_sections_are_what_the_planner_can_be_asked():
  todo = gpu_check.sections()
  assert len(set(todo)) == len(todo)
  for section in todo:
    architectures.architecture(section.model)
    request_lib.resolved(gpu_sections.request_of(section, "h100:1"))


def test_random_params():
  of = jax.ShapeDtypeStruct
  shapes = {
      "norm": {"scale": of((3,), jnp.bfloat16)},
      "layers": {
          "kernel": of((3, 50, 70), jnp.bfloat16),
          "bias": of((3, 70), jnp.float32),
      },
  }
  key = jax.random.key(0)
  params = gpu_sections.random_params(shapes, key)
  assert jax.tree.map(lambda x: of(x.shape, x.dtype), params) == shapes
  kernel = np.asarray(params["layers"]["kernel"], np.float32)
  # The relative error of a standard deviation of n numbers is 1 / √(2 n).
  np.testing.assert_allclose(kernel.std(), 0.02, rtol=5 / np.sqrt(2 * 10500))
  np.testing.assert_array_equal(params["norm"]["scale"], 1)
  np.testing.assert_array_equal(params["layers"]["bias"], 0)


def test_blocks_of_random_params_differ(monkeypatch):
  monkeypatch.setattr(gpu_sections, "_DRAWN", 64)
  shapes = {"kernel": jax.ShapeDtypeStruct((6, 35), jnp.float32)}
  params = gpu_sections.random_params(shapes, jax.random.key(0))
  assert len(np.unique(params["kernel"])) == 6 * 35


def entry(section, **more):
  """A section's entry in the results."""
  return {**dataclasses.asdict(section), "label": section.label, **more}


def test_table():
  update = Section("update", "m", rank=16)
  results = {
      "device": {"platform": "gpu", "memory_limit": 80 * GIB},
      "sections": [
          entry(
              update,
              seconds=[1.0, 3.0, 2.0],
              peak_bytes_before=GIB,
              peak_bytes=3 * GIB,
              compiled_peak_bytes=2 * GIB,
              plan={"peak_bytes": 4 * GIB},
          ),
          entry(
              dataclasses.replace(update, optimizer="dense_adam"),
              seconds=[4.0],
              peak_bytes_before=9 * GIB,
              peak_bytes=9 * GIB,
              plan={"error": "no"},
          ),
          entry(dataclasses.replace(update, rank=64), skipped="9 of 8 GiB"),
          entry(
              Section("rollout", "m"), seconds=[1.0], tokens_per_second=12345.6
          ),
      ],
  }
  rows = gpu_check.device_table(results).splitlines()
  cells = [[c.strip() for c in r.strip("|").split("|")] for r in rows[2:6]]
  logra = "3.000 2.000 4.000 1.500 0.750 2.000 0.500 -".split()
  assert cells[0] == ["m: logra, rank 16", *logra, ""]
  dense = ["≤ 9.000", *"- - - - 4.000 1.000 -".split()]
  assert cells[1] == ["m: dense_adam", *dense, "planner: no"]
  assert cells[2][-1] == "does not fit: 9 of 8 GiB"
  assert cells[3] == ["m: rollout", *["-"] * 7, "12346", ""]
  assert "by 25.0 % at most" in rows[-1]
