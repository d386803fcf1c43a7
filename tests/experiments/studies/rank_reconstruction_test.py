"""Tests of cosines from thin products, and of their tables."""

import numpy as np
import pytest

from experiments.studies import gradients
from experiments.studies.rank_reconstruction import (
    analysis,
    cosines,
    run,
    sweep,
)

L, D_IN, D_OUT = 2, 48, 20
PATH = "layers/q_proj/kernel"


def stack(seed=0, *shape):
  shape = shape or (L, D_IN, D_OUT)
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bases(gradient, rank, distribution, seed=0, count=0):
  drawn = gradients.draw_bases(
      {PATH: gradient}, rank, distribution, seed, count
  )
  return drawn[PATH]


def cosine64(a, b):
  a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
  return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("method", cosines.METHODS)
@pytest.mark.parametrize("distribution", sweep.DISTRIBUTIONS)
def test_thin_cosine_is_that_of_the_formed_reconstruction(distribution, method):
  g = stack()
  a = bases(g, 5, distribution)
  thin = cosines.of_sketch(a, g, method).cosine()
  for layer in range(L):
    wide = a[layer].astype(np.float64)
    middle = np.eye(5)
    if method == "least_squares":
      middle = np.linalg.inv(wide @ wide.T)
    dense = wide.T @ middle @ wide @ g[layer]
    np.testing.assert_allclose(thin[layer], cosine64(dense, g[layer]), 1e-5)
    one = slice(layer, layer + 1)
    rebuilt = cosines.reconstruct([a[one]], [g[one]], method)
    np.testing.assert_allclose(rebuilt[0], dense, atol=1e-3)
    formed = cosines.of_arrays(rebuilt, g[one]).cosine()
    np.testing.assert_allclose(formed, thin[layer], 1e-4)


def test_full_rank_least_squares_is_the_gradient():
  g = stack()
  a = stack(1, L, D_IN, D_IN) / D_IN**0.5
  by_layer = cosines.of_sketch(a, g, "least_squares").cosine()
  np.testing.assert_allclose(by_layer, 1.0, atol=1e-4)
  assert (cosines.of_sketch(a, g, "plain").cosine() < 0.8).all()


@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("method", cosines.METHODS)
def test_predicted_cosine_is_met_whatever_the_gradient(rank, method):
  # A gradient of full rank, and one of rank one.
  full = stack(1, 1, 256, 64)
  single = stack(2, 1, 256, 1) @ stack(3, 1, 1, 64)
  # The prediction is of the mean of squares over bases.
  for g, tolerance in ((full, 0.1), (single, 0.25)):
    measured = [
        cosines.of_sketch(bases(g, rank, "rademacher", seed), g, method)
        for seed in range(20)
    ]
    mean = np.sqrt(np.mean([p.cosine() ** 2 for p in measured]))
    want = float(cosines.predicted(rank, 256, method))
    assert abs(mean / want - 1) < tolerance, (mean, want)
  np.testing.assert_allclose(
      cosines.predicted(rank, 256, "plain"), (rank / (rank + 256)) ** 0.5
  )


@pytest.mark.parametrize("method", cosines.METHODS)
@pytest.mark.parametrize("distribution", sweep.DISTRIBUTIONS)
def test_predicted_cosine_of_full_rank_is_met(distribution, method):
  g = stack()
  for rank in (D_IN, 2 * D_IN):
    a = bases(g, rank, distribution)
    measured = cosines.of_sketch(a, g, method).cosine()
    want = cosines.predicted(rank, D_IN, method)
    np.testing.assert_allclose(measured, want, atol=1e-5)


def test_window_with_a_fixed_basis_is_the_sum_of_its_reconstructions():
  window = [stack(seed) for seed in range(3)]
  a = [bases(window[0], 4, "rademacher", count=i) for i in range(3)]
  assert not np.array_equal(a[0], a[1])
  total = sum(window)
  products = run.compare(a, window, total, 2, "plain")
  assert len(products["one"]) == 2
  rebuilt = cosines.reconstruct([a[0]] * 3, window, "plain")
  fixed = cosines.of_arrays(rebuilt, total)
  np.testing.assert_allclose(
      products["fixed"][0].cosine(), fixed.cosine(), rtol=1e-4
  )
  refreshed = sum(
      x.swapaxes(1, 2) @ (x @ g) for x, g in zip(a, window, strict=True)
  )
  np.testing.assert_allclose(
      products["refreshed"][0].cosine()[0],
      cosine64(refreshed[0], total[0]),
      1e-4,
  )


def rows_by_hand():
  """Rows of two kernels, the second of which has ten times the size."""
  what = {
      "point": 0,
      "distribution": "rademacher",
      "method": "plain",
      "rank": 4,
  }

  def row(module, cosine, size):
    products = [cosine * size, size, size]
    both = {"one": [products], "fixed": [products], "refreshed": [products]}
    by_basis = {
        "one": [[cosine]],
        "fixed": [[cosine]],
        "refreshed": [[cosine + 0.05]],
    }
    return {
        **what,
        "module": module,
        "d_in": 60,
        "cosine": by_basis,
        "products": both,
    }

  return [row("q_proj", 0.2, 1.0), row("k_proj", 0.4, 10.0)]


def test_tables_of_rows_made_by_hand(tmp_path):
  rows = rows_by_hand()
  np.testing.assert_allclose(analysis.layers(rows, "one").mean(), 0.3)
  # (0.2 · 1 + 0.4 · 10) / (1 + 10)
  assert analysis.of_all(rows, "one") == f"{4.2 / 11:.3f}"
  text = analysis.table(rows)
  # √(4 / 64) = 0.25
  assert "| rademacher | AᵀS | 4 | 0.250 | 0.300 (0.200 to 0.400) |" in text
  assert "| +0.000 | +0.050 | 0.382 |" in text
  assert "| q_proj | 60 | 0.200, 0.250 |" in text
  analysis.draw(rows, tmp_path)
  assert (tmp_path / "rank_reconstruction.png").stat().st_size > 1000
