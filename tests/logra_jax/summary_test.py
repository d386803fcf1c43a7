"""Tests of the table that `summary` formats."""

import re

import jax
import jax.numpy as jnp
import optax

import logra_jax
from tests.helpers import toy

SHAPES = {
    "embed": (100, 16),
    "layers/q_proj/kernel": (3, 16, 8),
    "layers/up_proj/kernel": (3, 16, 40),
    "layers/up_proj/bias": (3, 40),
    "norm/scale": (16,),
}


def row(text, path):
  (line,) = [x for x in text.splitlines() if x.startswith(path + " ")]
  return re.split(r"\s{2,}", line)


def test_summary():
  params = toy.tree(SHAPES)
  params["norm"]["scale"] = params["norm"]["scale"].astype(jnp.bfloat16)
  tx = logra_jax.sketch(
      rank={".*/q_proj/.*": 4, ".*": 64}, others={"embed": optax.adam(1e-3)}
  )
  state = tx.init(params)
  text = logra_jax.summary(params, state)
  kib = lambda n: f"{n / 1024:.1f} KiB"
  q, up = 3 * 16 * 8 * 4, 3 * 16 * 40 * 4
  assert row(text, "layers/q_proj/kernel") == [
      "layers/q_proj/kernel",
      "[3, 16, 8]",
      "sketched, rank 4",
      kib(q),
      f"{3 * 4 * 8 * 4} B",
  ]
  # The rank of 64 is clipped to d_in = 16.
  assert row(text, "layers/up_proj/kernel") == [
      "layers/up_proj/kernel",
      "[3, 16, 40]",
      "sketched, rank 16",
      kib(up),
      kib(3 * 16 * 40 * 4),
  ]
  embed = 100 * 16 * 4
  assert row(text, "embed")[2:] == ["densely", kib(embed), kib(embed)]
  assert row(text, "layers/up_proj/bias")[2:] == ["frozen", "480 B", "-"]
  assert row(text, "norm/scale")[2:] == ["frozen", "32 B", "-"]
  total = lambda kind: next(
      x for x in text.splitlines() if x.startswith(kind + " ")
  )
  assert kib(q + up) in total("sketched") and "2 arrays" in total("sketched")
  assert kib(embed) in total("densely")
  assert "512 B in 2 arrays" in total("frozen")
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
  # Most of it is Adam's two moments of the embedding.
  assert size > 2 * embed and kib(size) in total("optimizer state")


def test_summary_of_shapes_only():
  params = toy.tree(SHAPES)
  tx = optax.chain(logra_jax.sketch(rank=4), optax.scale_by_learning_rate(1e-3))
  shapes = jax.eval_shape(lambda p: p, params)
  state = jax.eval_shape(tx.init, shapes)
  expected = logra_jax.summary(params, tx.init(params))
  assert logra_jax.summary(shapes, state) == expected
