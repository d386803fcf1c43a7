"""Tests that every optimizer runs the training program, from end to end."""

import jax
import numpy as np
import pytest

from experiments import export, lora, metrics, pretrained, train
from experiments.configs import tiny


def _config(name, **changes):
  config = tiny.get_config().unlock()
  config.updates = 2
  config.evaluate.every = 2
  config.optimizer.name = name
  config.update_from_flattened_dict(changes)
  return config.lock()


def _rows(workdir):
  rows = metrics.read_rows(workdir / "metrics.jsonl")
  return [row for row in rows if "train/loss" in row]


def _changed(before, after):
  """Paths of the parameters that differ."""
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  before = jax.tree_util.tree_leaves_with_path(before)
  after = jax.tree.leaves(after)
  return {
      name(path)
      for (path, x), y in zip(before, after, strict=True)
      if (np.asarray(x) != np.asarray(y)).any()
  }


@pytest.mark.parametrize(
    ("name", "budget", "others"),
    [
        ("dense_adam", False, "frozen"),
        ("lora", True, "frozen"),
        ("galore", True, "adam"),
        ("muon", False, "adam"),
        ("logra", False, "adam"),
        pytest.param("dense_adam", True, "adam", marks=pytest.mark.slow),
        pytest.param("lora", False, "adam", marks=pytest.mark.slow),
        pytest.param("galore", False, "frozen", marks=pytest.mark.slow),
        pytest.param("muon", True, "frozen", marks=pytest.mark.slow),
        pytest.param("logra", True, "adam", marks=pytest.mark.slow),
    ],
)
def test_each_optimizer_runs_the_program(name, budget, others, tmp_path):
  config = _config(name, **{"kl.enabled": budget, "optimizer.others": others})
  result = train.train(config, tmp_path / "run")
  assert result.update == 2
  rows = _rows(tmp_path / "run")
  assert len(rows) == 2
  for row in rows:
    assert np.isfinite(row["train/loss"])
    assert ("kl/predicted" in row) == budget
  if budget:
    kl = [row["kl/predicted"] for row in rows]
    assert max(kl) > 0
    assert max(kl) <= 1.001 * config.kl.budget
  before = train.load_model(config).params
  changed = _changed(before, lora.merge(result.state.params))
  projections = {path for path in changed if "_proj/kernel" in path}
  assert len(projections) == 7
  assert (changed == projections) == (others == "frozen")


def test_a_resumed_run_with_adapters_exports_merged_kernels(tmp_path):
  """Interrupted after one update, it ends where an undisturbed one does."""
  config = _config("lora", **{"checkpoint.every": 1})
  path = tmp_path / "run"
  result = train.train(config, path)
  node = result.state.params["layers"]["q_proj"]["kernel"]
  assert isinstance(node, lora.LoRAKernel) and node.b.any()
  newest = path / "checkpoints" / "000002"
  for file in sorted(newest.rglob("*"), reverse=True):
    file.rmdir() if file.is_dir() else file.unlink()
  newest.rmdir()
  again = train.train(config, path)
  jax.tree.map(
      np.testing.assert_array_equal, again.state.params, result.state.params
  )
  assert export.export(path, tmp_path / "hf") == 2
  exported = pretrained.load(tmp_path / "hf").params
  assert not _changed(exported, lora.merge(result.state.params))
  assert _changed(exported, train.load_model(config).params)
