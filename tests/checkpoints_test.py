"""Tests of checkpoints: whole or not there, damage told and passed over."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import checkpoints


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
  with pytest.raises(RuntimeError, match=r"all checkpoints .* damaged"):
    saved.restore(_state(), lambda text: None)


def test_what_a_kill_left_half_written_does_not_count(tmp_path):
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(1, _state())
  half = tmp_path / ".tmp-000002"
  half.mkdir()
  (half / "state").write_text("half")
  again = checkpoints.Checkpoints(tmp_path)
  assert again.updates() == [1]
  assert not half.exists()


def test_keep_must_be_positive(tmp_path):
  with pytest.raises(ValueError, match="keep must be at least 1, not 0"):
    checkpoints.Checkpoints(tmp_path, keep=0)
