"""Tests of directions, of their gains, and of the tables."""

import math
import types

import numpy as np
import pytest

from experiments.configs import quickstart
from experiments.studies import gradients
from experiments.studies.gain_per_kl import analysis, directions, run, sweep
from experiments.studies.gain_per_kl.sweep import Direction

PATHS = ("layers/q_proj/kernel", "layers/down_proj/kernel")


def gradient(seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
  return {PATHS[0]: draw(2, 24, 12), PATHS[1]: draw(2, 40, 24)}


def make(direction, g, seed=0):
  return directions.make(direction, g, quickstart.get_config(), seed)


def test_the_sweep_has_every_kind_once_and_the_baseline_first():
  all_of_them = [d for group in sweep.GROUPS for d in group]
  assert len({d.name for d in all_of_them}) == len(all_of_them)
  assert {d.kind for d in all_of_them} == set(directions.KINDS)
  assert all_of_them[0].name == analysis.BASELINE


def test_full_rank_orthonormal_sketch_is_the_gradient():
  g = {PATHS[0]: gradient()[PATHS[0]]}
  full = make(Direction("sketch", 24, "orthonormal"), g)
  np.testing.assert_allclose(full[PATHS[0]], g[PATHS[0]], atol=1e-5)
  thin = make(Direction("sketch", 4, "orthonormal"), g)
  assert np.linalg.matrix_rank(thin[PATHS[0]]).tolist() == [4, 4]


@pytest.mark.parametrize("kind", ["row_adam", "row_adam_norm"])
def test_row_adam_divides_columns_of_the_sketch(kind):
  g = gradient()
  basis = gradients.draw_bases(g, 4, "rademacher", 3)
  steps = make(Direction(kind, 4, "rademacher"), g, 3)
  for path, x in g.items():
    s = basis[path] @ x
    d = s / np.sqrt(np.mean(s**2, axis=1, keepdims=True))
    if kind == "row_adam_norm":
      size = lambda a: np.sqrt(np.sum(a**2, axis=(1, 2), keepdims=True))
      d *= size(s) / size(d)
    np.testing.assert_allclose(
        steps[path], basis[path].swapaxes(1, 2) @ d, rtol=1e-3, atol=1e-4
    )


def test_low_rank_is_the_best_approximation():
  g = gradient()
  approximations = make(Direction("low_rank", 4), g)
  for path, x in g.items():
    u, s, vt = np.linalg.svd(x)
    best = (u[..., :4] * s[:, None, :4]) @ vt[:, :4]
    error = np.linalg.norm(x - approximations[path]) / np.linalg.norm(x - best)
    assert 1 - 1e-5 < error < 1.02, error


def test_orthogonal_direction_has_near_equal_singular_values():
  steps = make(Direction("orthogonal"), gradient())
  for path, x in steps.items():
    s = np.linalg.svd(x, compute_uv=False)
    before = np.linalg.svd(gradient()[path], compute_uv=False)
    # Newton-Schulz leaves them between 0.7 and 1.2 times one size.
    assert (s.max(1) / s.min(1) < 2).all()
    assert (before.max(1) / before.min(1) > 3).all()
    assert (np.sum(x * gradient()[path], axis=(1, 2)) > 0).all()


def test_a_batch_does_not_judge_itself():
  batches = [gradient(seed) for seed in range(4)]
  direction = gradient(9)
  total = {p: sum(b[p] for b in batches) for p in PATHS}
  flat = lambda x: np.concatenate([x[p].ravel() for p in PATHS]).astype(float)
  judge = lambda own, total: run.Judge(
      gradient=own, total=total, batches=4, kl=lambda d: 0.08
  )(direction)
  gains = judge(batches[1], total)
  others = np.mean([flat(batches[i]) for i in (0, 2, 3)], axis=0)
  length = math.sqrt(2 * 0.08)
  d = flat(direction)
  np.testing.assert_allclose(gains["held_out"], others @ d / length, rtol=1e-2)
  np.testing.assert_allclose(
      gains["own"], flat(batches[1]) @ d / length, rtol=1e-3
  )
  # The gain does not depend on batch 1 itself.
  changed = {p: 5 * batches[1][p] for p in PATHS}
  more = {p: total[p] + 4 * batches[1][p] for p in PATHS}
  again = judge(changed, more)
  np.testing.assert_allclose(again["held_out"], gains["held_out"], rtol=1e-2)
  assert abs(again["own"] / gains["own"] - 5) < 1e-2


def test_total_gradient_adds_all_batches():
  batches = [gradient(seed) for seed in range(3)]
  source = types.SimpleNamespace(
      gradient=lambda params, point, index: batches[index]
  )
  total = run.total_gradient(source, None, 0, 3)
  for path in PATHS:
    want = sum(b[path] for b in batches)
    np.testing.assert_allclose(total[path], want, rtol=1e-6, atol=1e-6)
  assert np.array_equal(batches[0][PATHS[0]], gradient(0)[PATHS[0]])


def test_pseudo_values_are_those_of_pairs():
  # h[i, j] = x_i x_j is symmetric, so that the shortcut is exact.
  x = np.random.default_rng(0).standard_normal(8) + 1
  pairs = np.outer(x, x)
  np.fill_diagonal(pairs, np.nan)
  held_out = np.nanmean(pairs, axis=1)
  mean_of = lambda keep: np.nanmean(pairs[np.ix_(keep, keep)])
  everything = np.arange(8)
  want = [
      8 * mean_of(everything) - 7 * mean_of(np.delete(everything, b))
      for b in range(8)
  ]
  np.testing.assert_allclose(analysis.pseudo_values(held_out), want)
  # The ratio to a direction of half the gain is 2, without spread.
  ratio = analysis.pseudo_values(held_out, held_out / 2)
  np.testing.assert_allclose(ratio, 2.0)


def rows_by_hand(points=(0, 5)):
  rng = np.random.default_rng(0)
  rows = []
  for point in points:
    for batch in range(4):
      gain = 1 + 0.1 * rng.standard_normal()
      for name, factor in (("dense", 1.0), ("sign", 0.5)):
        rows.append(
            {
                "point": point,
                "batch": batch,
                "direction": name,
                "held_out": factor * gain,
                "own": 3.0,
                "cosine": 0.25,
            }
        )
  return rows


def test_tables_of_rows_made_by_hand(tmp_path):
  rows = rows_by_hand()
  text = analysis.table(rows)
  assert "4 batches at each point" in text
  # The gain is a half in every batch, so that the ratio has no spread.
  assert "| 0.5 [0.5, 0.5] | 3 | 0.25 |" in text
  assert "| dense |" in text
  analysis.draw(rows, tmp_path)
  assert (tmp_path / "gain_per_kl.png").stat().st_size > 1000


def test_directions_without_all_batches_are_left_out():
  rows = rows_by_hand()
  cut = [r for r in rows if (r["direction"], r["batch"]) != ("sign", 3)]
  assert {r["direction"] for r in analysis.complete_rows(cut)} == {"dense"}
  assert len(analysis.complete_rows(rows)) == len(rows)
