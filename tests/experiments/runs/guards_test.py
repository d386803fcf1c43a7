"""Tests of the guards: each is provoked."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.configs import tiny
from experiments.runs import checkpoints, guards, loop
import logra_jax

_GOOD = {"train/loss": 0.1, "kl/predicted": 1e-3, "train/skipped": 0.0}
_BAD = [
    {"train/loss": None},
    {"kl/predicted": None},
    {"kl/realised": None},
    {"train/skipped": 1.0},
]


def _batch(update):
  tokens = jnp.full((2, 3), update, jnp.int32)
  return {"rollout": {"tokens": tokens}, "advantages": jnp.array([math.nan, 1])}


def test_updates_lost_in_a_row_end_the_run_and_leave_the_batch(tmp_path):
  guard = guards.SkipGuard(tmp_path, limit=4)
  for update, bad in enumerate(_BAD[:3], start=1):
    guard.observe(update, _GOOD | bad, _batch(update))
  assert guard.in_a_row == 3
  guard.observe(4, _GOOD, _batch(4))  # One good update, and counting restarts.
  for update, bad in enumerate(_BAD[:3], start=5):
    guard.observe(update, _GOOD | bad, _batch(update))
  assert not list(tmp_path.iterdir())
  with pytest.raises(
      guards.NonFiniteError,
      match=r"4 updates in a row.* update 8 .*batch is in",
  ):
    guard.observe(8, _GOOD | _BAD[3], _batch(8))
  with np.load(tmp_path / "bad_batch-000008.npz") as saved:
    assert (saved["rollout/tokens"] == 8).all()
    assert math.isnan(saved["advantages"][0])


def test_a_resumed_run_goes_on_counting(tmp_path):
  evaluation = {"eval/accuracy": 0.5}
  rows = [_BAD[0], _GOOD, _GOOD | _BAD[0], evaluation, _GOOD | _BAD[1]]
  guard = guards.SkipGuard(tmp_path, limit=3, rows=rows)
  assert guard.in_a_row == 2
  with pytest.raises(guards.NonFiniteError):
    guard.observe(5, _BAD[3], _batch(5))


def test_a_limit_of_0_is_an_error(tmp_path):
  with pytest.raises(ValueError, match="limit=0 must be at least 1"):
    guards.SkipGuard(tmp_path, limit=0)


def test_an_optimizer_in_an_endless_budget_skips_what_is_not_finite():
  """The form in which optimizers without sketches are protected."""
  plain = optax.adam(0.1)
  tx = logra_jax.kl_budget(math.inf, plain, alpha_max=1.0)
  params = {"w": jnp.array([1.0, 2.0])}
  some_kl = lambda update: jnp.float32(1e-3)
  step = jax.jit(lambda g, s: tx.update({"w": g}, s, params, probe=some_kl))
  good = jnp.array([0.5, -1.0])
  expected, state = plain.update({"w": good}, plain.init(params), params)
  updates, found = step(good, tx.init(params))
  np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)
  for n, bad in enumerate([math.nan, math.inf], start=1):
    lost, found = step(jnp.array([bad, 1.0]), found)
    assert not lost["w"].any()
    assert logra_jax.diagnostics(found)["skipped"] == n
  # As if they had not been: the moments, and the next step.
  expected, _ = plain.update({"w": good}, state, params)
  updates, _ = step(good, found)
  np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-6)


def _rows(**columns):
  """Lines of the record, from columns of one length."""
  names = {
      "reward": "train/reward",
      "entropy": "train/entropy",
      "length": "rollout/length",
      "finished": "rollout/finished",
  }
  for values in zip(*columns.values(), strict=True):
    yield {names[n]: v for n, v in zip(columns, values, strict=True)}


def _warnings(watch, **columns):
  """Index of the line and text of each warning."""
  found = [watch.observe(row) for row in _rows(**columns)]
  return [(i, text) for i, texts in enumerate(found) for text in texts]


def test_a_reward_collapse_is_told_once_an_episode():
  watch = guards.Watch(max_new_tokens=100)
  # The mean of ten falls below 0.4 = 0.8 / 2 with the sixth of the low ones.
  rewards = [0.2] * 10 + [0.8] * 10 + [0.1] * 30 + [0.8] * 30 + [0.1] * 10
  found = _warnings(watch, reward=rewards)
  assert [i for i, _ in found] == [25, 85]
  text = "reward collapse: 0.38 in the last 10 updates, 0.8 at best"
  assert found[0][1] == text


def test_noise_is_no_collapse():
  rng = np.random.default_rng(0)
  watch = guards.Watch(max_new_tokens=100)
  # Shares of right answers of 16, mean 0.3: they differ by 0.11.
  assert not _warnings(watch, reward=rng.binomial(16, 0.3, size=1000) / 16)


def test_growing_and_cut_off_responses_are_told():
  watch = guards.Watch(max_new_tokens=100)
  lengths = [20.0] * 10 + [45.0] * 10 + [95.0] * 20
  finished = [1.0] * 20 + [0.25] * 20
  (grown, growth), (cut, cut_off) = _warnings(
      watch, length=lengths, finished=finished
  )
  # 40 < (20 + 9 * 45) / 10; 90 < (45 + 9 * 95) / 10 = 90.0 not yet.
  assert (grown, cut) == (18, 29)
  assert growth == (
      "growing responses: 42.5 tokens in the last 10 updates, 20 in the first"
  )
  assert "95 tokens in the last 10 updates, of at most 100; 25% end" in cut_off


def test_short_answers_at_the_limit_that_end_are_fine():
  watch = guards.Watch(max_new_tokens=2)
  assert not _warnings(watch, length=[2.0] * 30, finished=[0.9] * 30)


def test_an_entropy_collapse_is_told():
  watch = guards.Watch(max_new_tokens=100)
  ((i, text),) = _warnings(watch, entropy=[1.0] * 10 + [0.01] * 20)
  # (1.0 + 9 * 0.01) / 10 is more than 0.05; ten of 0.01 are not.
  assert i == 19
  assert "entropy collapse: 0.01 nats per token" in text and "1 in the" in text


def test_a_resumed_run_does_not_repeat_its_warnings():
  rows = list(_rows(entropy=[1.0] * 10 + [0.01] * 20))
  rows = [row | {"train/reward": 0.5} for row in rows]
  resumed = guards.Watch(max_new_tokens=100, rows=rows[:25])
  assert not any(resumed.observe(row) for row in rows[25:])
  earlier = guards.Watch(max_new_tokens=100, rows=rows[:15])
  assert any(earlier.observe(row) for row in rows[15:])


def test_numbers_that_are_missing_are_left_out():
  watch = guards.Watch(max_new_tokens=100)
  for _ in range(30):
    assert watch.observe({"train/reward": None}) == []
    assert watch.observe({"eval/accuracy": 0.0}) == []


def test_compilations_are_counted_and_late_ones_told_once():
  square = jax.jit(lambda x: x * x)
  with guards.CompileCounter(settle=2, late=2) as counter:
    told = []
    for size in (3, 4, 4, 5, 6, 8):  # The third is compiled already.
      square(np.ones(size, np.float32)).block_until_ready()
      told.append(counter.observe())
  assert counter.count == 5
  assert counter.seconds > 0
  assert [text is not None for text in told] == [False] * 4 + [True, False]
  assert told[4].startswith("1 programs compiled in the 5th update")
  square(np.ones(7, np.float32))  # After it: not counted.
  assert counter.count == 5


def test_what_is_expected_to_compile_is_not_told():
  cube = jax.jit(lambda x: x * x * x)
  with guards.CompileCounter(settle=0, late=1) as counter:
    with counter.expected():
      cube(np.ones(3, np.float32))
    assert counter.observe() is None
    assert counter.count == 1


@pytest.mark.parametrize(
    "phase, advice",
    [
        ("rollout", r"out of memory in the rollout .*rollout\.slots"),
        ("update", r"loss\.micro_rows.*remat=True"),
        ("evaluate", r"evaluate\.prompts"),
        ("load", r"param_dtype='bfloat16'"),
    ],
)
def test_out_of_memory_says_what_to_lower(phase, advice):
  with pytest.raises(guards.OutOfMemoryError, match=advice):
    with guards.advise_on_memory(phase):
      jnp.zeros((1 << 50,), jnp.int8).block_until_ready()  # A pebibyte.


def test_the_hosts_memory_counts_as_well():
  with pytest.raises(guards.OutOfMemoryError, match="out of memory in the"):
    with guards.advise_on_memory("rollout"):
      np.ones((1 << 55,), np.int8)


def test_other_errors_pass():
  with pytest.raises(ZeroDivisionError), guards.advise_on_memory("update"):
    _ = 1 // 0

  def fail(x):
    raise KeyError(x)

  call = lambda x: jax.pure_callback(fail, x, x)
  with pytest.raises(jax.errors.JaxRuntimeError, match="KeyError"):
    with guards.advise_on_memory("update"):
      jax.jit(call)(jnp.ones(2)).block_until_ready()


@pytest.mark.slow
def test_a_run_that_diverges_stops_and_leaves_the_batch(tmp_path):
  config = tiny.get_config().unlock()
  config.updates = 20
  config.kl.enabled = False
  config.optimizer.name = "dense_sgd"
  config.optimizer.learning_rate = 1e30  # The weights it leads to overflow.
  with pytest.raises(guards.NonFiniteError, match="5 updates in a row"):
    loop.train(config.lock(), tmp_path)
  (path,) = tmp_path.glob("bad_batch-*.npz")
  with np.load(path) as saved:
    (name,) = [name for name in saved if name.endswith("advantages")]
    assert np.isfinite(saved[name]).all()
  # What was saved last is of before: of numbers.
  saved = checkpoints.Checkpoints(tmp_path / "checkpoints")
  for update in saved.updates():
    assert all(np.isfinite(x).all() for x in saved.load(update).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logra", "dense_adam"])
def test_a_loss_that_is_not_finite_leaves_weights_and_moments(name, tmp_path):
  config = tiny.get_config().unlock()
  config.optimizer.name = name
  saved = checkpoints.Checkpoints(tmp_path / "checkpoints")
  run = loop.Run(config, tmp_path, saved, loop.make_mesh(config))
  (batch,), _ = run._steps(run.collector.collect(0, None))

  def kept():  # Scalars of the optimizer's state count what was skipped.
    moments = [x for x in jax.tree.leaves(run.state.opt_state) if x.ndim]
    return jax.tree.map(np.array, (run.state.params, moments))

  before = kept()
  given = batch.tokens.advantages
  for advantages, lost in (
      (given.at[0, 0, 0].set(math.nan), 1),
      (given.at[0, 1, 0].set(math.inf), 1),
      (given, 0),
  ):
    tokens = batch.tokens.replace(advantages=advantages)
    run.state, metrics = run.train_step(run.state, batch.replace(tokens=tokens))
    assert metrics["train/skipped"] == lost
    same = jax.tree.map(np.array_equal, before, kept())
    assert all(jax.tree.leaves(same)) == bool(lost)
  assert np.isfinite(metrics["train/loss"])
