"""Tests that the examples in the README and in docstrings run."""

import doctest
import importlib
import pkgutil
import re

import jax
import jax.numpy as jnp
import pytest

import logra_jax
from tests.helpers.paths import ROOT

README = ROOT / "README.md"
MODULES = sorted(
    f"logra_jax.{m.name}" for m in pkgutil.iter_modules(logra_jax.__path__)
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
  result = doctest.testmod(importlib.import_module(name))
  assert result.failed == 0


def test_docstrings_have_examples():
  finder = doctest.DocTestFinder()
  modules = [importlib.import_module(name) for name in MODULES]
  examples = [e for m in modules for d in finder.find(m) for e in d.examples]
  assert len(examples) >= 6


def _front_door():
  blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
  (block,) = [b for b in blocks if "kl_probe" in b]
  return block


def _setting():
  """Returns the names that the README assumes, for a one-layer policy."""
  params = {
      "embed": jax.random.normal(jax.random.key(0), (11, 8)),
      "q_proj": {"kernel": jax.random.normal(jax.random.key(1), (8, 11))},
  }
  tokens = jnp.arange(12).reshape(2, 6) % 11

  def logits_fn(params, batch):
    x = params["embed"][batch["tokens"]]
    return logra_jax.dense(x, params["q_proj"]["kernel"])

  def loss_fn(params, batch):
    log_probs = jax.nn.log_softmax(logits_fn(params, batch)[:, :-1])
    taken = jnp.take_along_axis(log_probs, batch["tokens"][:, 1:, None], -1)
    return -jnp.mean(taken), {}

  batch = {"tokens": tokens, "completion_mask": jnp.ones((2, 6), bool)}
  return {
      "params": params,
      "loss_fn": loss_fn,
      "logits_fn": logits_fn,
      "batch": batch,
      "probe_batch": batch,
  }


def test_front_door_runs_and_descends():
  names = _setting()
  before, _ = names["loss_fn"](names["params"], names["batch"])
  exec(_front_door(), names)
  after, _ = names["loss_fn"](names["params"], names["batch"])
  assert after < before
  assert 0 < float(logra_jax.diagnostics(names["opt_state"])["alpha"]) <= 3


def test_front_door_without_learning_rate_meets_the_budget():
  names = _setting()
  lines = [
      line
      for line in _front_door().splitlines()
      if "scale_by_learning_rate" not in line
  ]
  exec("\n".join(lines), names)
  realised = logra_jax.realised_kl(names["probe"], names["params"])
  before, _ = names["loss_fn"](names["probe"].params, names["batch"])
  after, _ = names["loss_fn"](names["params"], names["batch"])
  assert after < before
  # The budget of the first update; third-order terms are a few percent.
  assert abs(float(realised) / 2e-4 - 1) < 0.1
