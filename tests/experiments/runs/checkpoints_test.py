"""Tests of checkpoints: whole or not there, damage told and passed over."""

import contextlib
import errno
import json
import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.runs import checkpoints


def _state(scale=1.0):
  params = {
      "a": {"kernel": scale * jnp.arange(12.0).reshape(3, 4)},
      "b": jnp.asarray([1.5, -2.0], jnp.bfloat16),
  }
  opt_state = optax.chain(optax.trace(0.9), optax.scale_by_adam()).init(params)
  return {"params": params, "opt_state": opt_state, "n": jnp.int32(scale)}


def _assert_equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for x, y in zip(
      jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def _largest_file(folder):
  files = [path for path in folder.rglob("*") if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def test_what_is_restored_is_what_was_saved(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path / "c")
  assert saved.restore(_state()) is None
  saved.save(3, _state(2.0))
  update, state = checkpoints.Checkpoints(tmp_path / "c").restore(_state())
  assert update == 3
  _assert_equal(state, _state(2.0))


def test_restores_to_shapes_alone(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(1, _state(2.0))
  _, state = saved.restore(jax.eval_shape(_state))
  _assert_equal(state, _state(2.0))


def test_only_the_newest_are_kept(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path, keep=2)
  for update in (1, 2, 10):
    saved.save(update, _state(update))
  assert saved.updates() == [2, 10]
  assert saved.restore(_state())[0] == 10


def test_saving_an_update_again_replaces_it(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(1, _state(1.0))
  saved.save(1, _state(5.0))
  _assert_equal(saved.restore(_state())[1], _state(5.0))


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest"])
def test_a_damaged_newest_falls_back_with_a_word(tmp_path, damage):
  saved = checkpoints.Checkpoints(tmp_path, keep=3)
  saved.save(1, _state(1.0))
  saved.save(2, _state(2.0))
  victim = _largest_file(tmp_path / "000002")
  content = victim.read_bytes()
  if damage == "flip":
    middle = len(content) // 2
    flipped = bytes([content[middle] ^ 1])
    victim.write_bytes(content[:middle] + flipped + content[middle + 1 :])
  elif damage == "truncate":
    victim.write_bytes(content[:-1])
  elif damage == "delete":
    victim.unlink()
  else:
    (tmp_path / "000002" / "manifest.json").write_text("{")
  told = []
  update, state = saved.restore(_state(), told.append)
  assert update == 1
  _assert_equal(state, _state(1.0))
  assert len(told) == 1
  assert "000002" in told[0] and "falling back" in told[0]


def test_when_all_are_damaged_nothing_is_made_up(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(1, _state())
  _largest_file(tmp_path / "000001").unlink()
  with pytest.raises(
      checkpoints.CheckpointError, match=r"all checkpoints .* damaged"
  ):
    saved.restore(_state(), lambda text: None)
  with pytest.raises(checkpoints.CheckpointError, match="is missing"):
    saved.load(1)


def test_what_a_kill_left_half_written_does_not_count(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(1, _state())
  half = tmp_path / ".tmp-000002"
  half.mkdir()
  (half / "state").write_text("half")
  again = checkpoints.Checkpoints(tmp_path)
  assert again.updates() == [1]
  assert half.exists()  # Whoever only reads leaves it to the run that writes.
  again.save(2, _state())
  assert again.updates() == [1, 2] and not half.exists()


def test_keep_must_be_positive(tmp_path):
  with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
    checkpoints.Checkpoints(tmp_path, keep=0)


def test_the_best_is_kept_beside_the_newest(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path, keep=1)
  assert saved.best() is None
  scores = [0.5, 0.9, float("nan"), 0.9, None]
  for update, score in enumerate(scores, start=1):
    saved.save(update, _state(update), score)
  assert saved.updates() == [2, 5]  # The first of two equals, and the last.
  assert saved.best() == (2, 0.9)
  # Another process knows it from the directory.
  again = checkpoints.Checkpoints(tmp_path, keep=1)
  assert again.best() == (2, 0.9)
  again.save(6, _state(6), 0.95)
  assert again.updates() == [6]


def test_checkpoints_passed_over_as_damaged_make_room(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path, keep=1)
  saved.save(2, _state(2), 0.5)
  saved.save(9, _state(9), 0.4)
  _largest_file(tmp_path / "000009").unlink()
  assert saved.restore(_state(), lambda text: None)[0] == 2
  saved.save(3, _state(3), 0.1)
  assert saved.updates() == [2, 3]  # The best and the newest.


def test_host_arrays_stay_host_arrays(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  rates = np.array([0.25, 1.0])
  saved.save(1, {"state": _state(), "curriculum": {"pass_rate": rates}})
  template = {"state": _state(), "curriculum": {"pass_rate": np.zeros(2)}}
  _, found = saved.restore(template)
  assert isinstance(found["curriculum"]["pass_rate"], np.ndarray)
  np.testing.assert_array_equal(found["curriculum"]["pass_rate"], rates)
  assert isinstance(found["state"]["params"]["b"], jax.Array)
  _assert_equal(found["state"], _state())
  loaded = saved.load(1)
  np.testing.assert_array_equal(loaded["curriculum/pass_rate"], rates)
  assert loaded["state/params/b"].dtype == jnp.bfloat16
  assert len(loaded) == len(jax.tree.leaves(template))


def test_what_is_saved_in_the_background_is_the_state_at_the_call(tmp_path):
  twice = jax.jit(
      lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0
  )
  state = _state(2.0)
  with checkpoints.Checkpoints(tmp_path, background=True) as saved:
    for update in (1, 2):
      saved.save(update, state, score=float(update))
      assert saved.best() == (update, update)
      state = twice(state)  # In place of the arrays that are being written.
  for update in (1, 2):
    expected = update * _state(2.0)["params"]["a"]["kernel"]
    found = saved.load(update)["params/a/kernel"]
    np.testing.assert_array_equal(found, expected)


@contextlib.contextmanager
def _no_room(limit):
  """Makes the system refuse to let a file grow over `limit` bytes."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _large_state(seed):
  noise = np.random.default_rng(seed).integers(0, 256, 1 << 18, np.uint8)
  return {"noise": noise}  # Does not compress.


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("limit", [0, 1 << 16])
def test_a_full_disk_leaves_the_last_good_one(tmp_path, background, limit):
  saved = checkpoints.Checkpoints(tmp_path, background=background)
  saved.save(1, _large_state(1))
  saved.wait()
  message = r"update 2 .* free\): File too large\. Free space .* update 1"
  with (
      _no_room(limit),
      pytest.raises(checkpoints.CheckpointError, match=message),
  ):
    saved.save(2, _large_state(2), score=1.0)
    saved.wait()
  assert [path.name for path in tmp_path.iterdir()] == ["000001"]
  assert saved.best() is None
  _assert_equal(saved.restore(_large_state(0))[1], _large_state(1))
  saved.save(2, _large_state(2))  # There is room again.
  assert saved.restore(_large_state(0))[0] == 2


def test_a_disk_that_fills_at_the_manifest_leaves_the_last_good_one(
    tmp_path, monkeypatch
):
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(1, _state(1))

  def full(descriptor):
    del descriptor
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(checkpoints.CheckpointError, match="No space left"):
    saved.save(2, _state(2))
  assert [path.name for path in tmp_path.iterdir()] == ["000001"]
  assert saved.restore(_state())[0] == 1


def test_an_error_of_the_background_surfaces_once(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path, background=True)
  with _no_room(0):
    saved.save(1, _state())
    with pytest.raises(checkpoints.CheckpointError, match="from the start"):
      saved.save(2, _state())
  saved.save(2, _state())
  saved.wait()
  assert saved.updates() == [2]
  with pytest.raises(ValueError, match="another"), _no_room(0), saved:
    saved.save(3, _state())
    raise ValueError("another")  # What ends the run is not hidden.


def test_the_score_is_in_the_hashed_files(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(1, _state(), 0.75)
  hashes = json.loads((tmp_path / "000001" / "manifest.json").read_text())
  assert "score.json" in hashes


def test_saves_are_due_by_count_and_by_time():
  timer = checkpoints.SaveTimer(every=10, minutes=2, start=1000.0)
  assert not timer.due(9, 1119.0)
  assert timer.due(9, 1120.0)  # Two minutes.
  assert timer.due(10, 1130.0)  # Ten updates; that restarts the clock.
  assert not timer.due(11, 1249.0)
  assert timer.due(12, 1250.0)
  by_count = checkpoints.SaveTimer(every=5, minutes=0, start=0.0)
  assert [u for u in range(1, 13) if by_count.due(u, 1e9)] == [5, 10]
  by_time = checkpoints.SaveTimer(every=0, minutes=0.5, start=0.0)
  assert [t for t in range(0, 100, 10) if by_time.due(1, t)] == [30, 60, 90]


def test_a_timer_without_intervals_is_never_due():
  timer = checkpoints.SaveTimer(every=0, minutes=0, start=0.0)
  assert not any(timer.due(update, 1e9 * update) for update in range(1, 100))


def test_a_timer_by_minutes_alone_counts_no_updates():
  timer = checkpoints.SaveTimer(every=0, minutes=1, start=0.0)
  assert [timer.due(n, 25.0 * n) for n in range(1, 7)] == [
      False,
      False,
      True,
      False,
      False,
      True,
  ]


def test_a_timer_refuses_negative_intervals():
  with pytest.raises(ValueError, match="minutes=-1 must be at least 0"):
    checkpoints.SaveTimer(every=1, minutes=-1, start=0.0)
