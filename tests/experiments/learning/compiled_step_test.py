"""Tests of which settings share a compiled program."""

import dataclasses

import jax
import pytest

from experiments.learning import compiled_step
from experiments.learning.train_step import UpdateSettings
from experiments.models import decoder, tiny
from experiments.parallel import sharding
from tests.helpers.configs import tiny_config

# Another valid value for every field of the settings, by dotted path. Without a
# learning rate there is an update ratio, see `_base`.
_CHANGES = {
    "sampling.max_new_tokens": 3,
    "sampling.min_new_tokens": 1,
    "sampling.temperature": 0.7,
    "sampling.top_k": 3,
    "sampling.top_p": 0.5,
    "sampling.stop": ("\n",),
    "loss.name": "rloo",
    "loss.clip_low": 0.1,
    "loss.clip_high": 0.3,
    "loss.reference_kl": 0.1,
    "loss.reference_estimator": "k2",
    "correction": "token",
    "correction_cap": 3.0,
    "chunk": 64,
    "optimizer.name": "dense_adam",
    "optimizer.others": "adam",
    "optimizer.update_ratio": 2e-3,
    "optimizer.momentum": 0.5,
    "optimizer.beta2": 0.9,
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.1,
    "optimizer.rank": 8,
    "optimizer.lora_alpha": 16.0,
    "optimizer.galore_gap": 100,
    "optimizer.distribution": "gaussian",
    "optimizer.refresh": True,
    "optimizer.preconditioner": "adam",
    "budget": None,
    "budget.budget": 2e-4,
    "budget.final_budget": 2e-4,
    "budget.anneal_updates": 200,
    "budget.alpha_max": 2.0,
    "measure": False,
    "mismatch": True,
}
# What is an array in the optimizer's state instead.
_SHARED = {"optimizer.seed": 7, "optimizer.learning_rate": 1e-2}


def _base(path=""):
  """Settings in which the field at `path` can be changed on its own."""
  changes = {}
  if path == "optimizer.update_ratio":
    changes = {"optimizer.learning_rate": 0.0, "optimizer.update_ratio": 1e-3}
  return UpdateSettings.of_config(tiny_config(**changes))


def _replace(settings, path, value):
  """The settings with the field at a dotted path replaced."""
  name, _, rest = path.partition(".")
  if rest:
    value = _replace(getattr(settings, name), rest, value)
  return dataclasses.replace(settings, **{name: value})


def _paths(settings, prefix=""):
  """The dotted paths of all fields that are not settings themselves."""
  paths = []
  for field in dataclasses.fields(settings):
    value = getattr(settings, field.name)
    path = prefix + field.name
    nested = dataclasses.is_dataclass(value)
    paths += _paths(value, f"{path}.") if nested else [path]
  return paths


@pytest.fixture(scope="module")
def make_programs():
  """A function from settings to their programs, for one model and mesh."""
  model = decoder.Decoder(tiny.make_tiny(0).config)
  mesh = sharding.make_mesh(
      {"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1]
  )
  return lambda settings: compiled_step.programs(
      model, mesh, settings.program_key(), (1,)
  )


def test_equal_settings_share_their_programs(make_programs):
  first, again = _base(), _base()
  assert first is not again
  prepare, step = make_programs(first)
  assert make_programs(again)[0] is prepare
  assert make_programs(again)[1] is step


@pytest.mark.parametrize("path", _SHARED)
def test_settings_in_the_optimizer_state_share_the_programs(
    path, make_programs
):
  changed = _replace(_base(), path, _SHARED[path])
  assert changed != _base()
  assert changed.program_key() == _base().program_key()
  assert make_programs(changed)[1] is make_programs(_base())[1]


def test_every_field_is_tested():
  nested = {"budget"}  # Settings, or None.
  assert set(_paths(_base())) | nested == _CHANGES.keys() | _SHARED.keys()


@pytest.mark.parametrize("path", _CHANGES)
def test_any_other_change_gives_another_key(path):
  before = _base(path)
  changed = _replace(before, path, _CHANGES[path])
  assert changed.program_key() != before.program_key()


def test_other_settings_have_other_programs(make_programs):
  changed = _replace(_base(), "loss.clip_low", 0.1)
  assert make_programs(changed)[1] is not make_programs(_base())[1]


def test_having_a_learning_rate_is_part_of_the_key():
  """Without one, the update ratio decides the size of a step."""
  with_rate = _base()
  optimizer = dataclasses.replace(
      with_rate.optimizer, learning_rate=0.0, update_ratio=1e-3
  )
  without = dataclasses.replace(with_rate, optimizer=optimizer)
  keys = [s.program_key().optimizer for s in (with_rate, without)]
  assert [key.learning_rate > 0 for key in keys] == [True, False]
