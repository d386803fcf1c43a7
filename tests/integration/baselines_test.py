"""Tests that every optimizer runs the training program, from end to end."""

import jax
import numpy as np
import pytest

from experiments import export
from experiments.models import load, lora
from experiments.runs import loop, record
from tests.helpers.configs import tiny_config


def _config(name, **changes):
  base = {"updates": 2, "evaluate.every": 2, "optimizer.name": name}
  return tiny_config(**(base | changes))


def _rows(workdir):
  rows = record.read_rows(workdir / "metrics.jsonl")
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


_SLOW = (
    ("galore", True, "adam"),
    ("dense_adam", True, "adam"),
    ("dense_adam", False, "frozen"),
    ("lora", False, "adam"),
    ("galore", False, "frozen"),
    ("muon", True, "adam"),
    ("logra", True, "adam"),
    ("logra", False, "frozen"),
    ("muon", False, "frozen"),
)


@pytest.mark.parametrize(
    ("name", "budget", "others"),
    [
        ("lora", True, "frozen"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in _SLOW),
    ],
)
def test_each_optimizer_runs_the_program(name, budget, others, tmp_path):
  config = _config(name, **{"kl.enabled": budget, "optimizer.others": others})
  result = loop.train(config, tmp_path / "run")
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
  before = load.for_run(config).params
  changed = _changed(before, lora.merge(result.state.params))
  projections = {path for path in changed if "_proj/kernel" in path}
  assert len(projections) == 7
  assert (changed == projections) == (others == "frozen")
  # The newest checkpoint is read back, and adapters are in the kernels.
  assert export.export(tmp_path / "run", tmp_path / "hf") == 2
  exported = load.from_path(tmp_path / "hf").params
  assert not _changed(exported, lora.merge(result.state.params))
