"""Tests of configs, of what they refuse, and of the optimizers they name."""

import re

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

from experiments.configs import quickstart, tiny
from experiments.learning import optimizers
from experiments.learning.train_step import UpdateSettings
from experiments.models import lora
from experiments.runs import check_config, loop, workdir
import logra_jax
from tests.helpers.paths import ROOT


def _names(config, prefix=""):
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from _names(value, f"{prefix}{name}.")
    else:
      yield prefix + name


def _with(config, changes):
  config = config.unlock()
  config.update_from_flattened_dict(changes)
  return config.lock()


@pytest.mark.parametrize("module", [quickstart, tiny])
def test_configs_are_sound_and_locked(module):
  config = module.get_config()
  check_config.check_config(config)
  with pytest.raises((KeyError, AttributeError)):
    config.optimizer.rnak = 8
  assert list(_names(config)) == list(_names(quickstart.get_config()))


def test_every_setting_is_read_somewhere():
  folder = ROOT / "experiments"
  source = "".join(
      path.read_text()
      for path in folder.rglob("*.py")
      if path.parent.name != "configs"
  )
  for name in _names(quickstart.get_config()):
    # As an attribute of a section, or as a field of settings.
    field = name.split(".")[-1]
    assert re.search(rf"\.{field}\b|^  {field}: ", source, re.M), name


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"optimizer.name": "adamm"}, "adamm.*dense_adam.*logra"),
        ({"optimizer.rank": 0}, "rank"),
        ({"optimizer.distribution": "uniform"}, "uniform"),
        ({"optimizer.refresh": True}, "refresh"),
        ({"optimizer.learning_rate": 0.0}, "learning_rate"),
        ({"optimizer.update_ratio": 6e-5}, "update_ratio"),
        (
            {
                "optimizer.name": "dense_adam",
                "optimizer.learning_rate": 0.0,
                "optimizer.update_ratio": 6e-5,
            },
            "update_ratio",
        ),
        ({"kl.budget": 0.0, "kl.final_budget": 0.0}, "budget"),
        ({"kl.budget": -1e-3}, "-0.001"),
        ({"kl.alpha_max": 0.0}, "alpha_max"),
        ({"kl.probe_responses": 0}, "kl.probe_responses=0"),
        ({"kl.probe_responses": 97}, "97.*96"),
        ({"rollout.responses": 1}, "group_size must be at least 2.*got 1"),
        ({"rollout.prompts": 0}, "rollout.prompts=0"),
        ({"rollout.temperature": 0.0}, "temperature=0.0"),
        ({"rollout.top_p": 0.0}, "config.rollout.top_p .*0.0"),
        ({"rollout.top_k": -1}, "config.rollout.top_k .*-1"),
        ({"rollout.min_new_tokens": 13}, "rollout.min_new_tokens=13.*12"),
        ({"rollout.stop": ("",)}, "config.rollout.stop .*''"),
        ({"rollout.cache_dtype": "int4"}, "cache_dtype='int4'"),
        (
            {"rollout.slots": -1},
            r"config\.rollout\.slots=-1 must be at least 0",
        ),
        ({"rollout.overlong": "drop"}, "config.rollout.overlong .*'drop'"),
        ({"rollout.overlong": "penalty"}, "overlong_buffer .* got 0"),
        ({"rollout.curriculum": 11}, "curriculum=11 .*prompts=12"),
        ({"loss.name": "dapoo"}, "dapoo.*dapo"),
        ({"loss.row_tokens": (140, 55)}, r"row_tokens=\(140, 55\) .*56"),
        ({"loss.row_tokens": ()}, r"row_tokens=\(\) .*56"),
        ({"loss.micro_rows": 0}, "loss.micro_rows=0"),
        ({"loss.minibatches": 5}, "loss.minibatches=5 .*12"),
        ({"loss.minibatches": 12, "kl.probe_responses": 9}, "9.*has, 8"),
        ({"loss.correction": "word"}, "correction .*'word'"),
        ({"loss.correction_cap": 0.5}, "correction_cap .*0.5"),
        ({"loss.reference_kl": -1.0}, "reference_kl.*-1.0"),
        ({"loss.reference_estimator": "k4"}, "reference_estimator .*'k4'"),
        ({"loss.clip_low": 1.5}, "clip_low.*1.5"),
        ({"updates": 0}, "updates=0"),
        ({"checkpoint.every": -1}, "checkpoint.every=-1"),
        ({"checkpoint.minutes": -1.0}, "checkpoint.minutes=-1.0"),
    ],
)
def test_bad_settings_are_refused_with_name_and_value(changes, match):
  config = _with(quickstart.get_config(), changes)
  with pytest.raises(ValueError, match=match):
    check_config.check_config(config)
    # What depends on the parameters shows with the first of them.
    UpdateSettings.of_config(config).make_optimizer().init(_params())


def test_unknown_model_and_task_are_refused_before_training(tmp_path):
  config = _with(tiny.get_config(), {"model": str(tmp_path / "none")})
  with pytest.raises(FileNotFoundError, match="none"):
    loop.train(config, tmp_path / "a")
  config = _with(tiny.get_config(), {"task.name": "additon"})
  with pytest.raises(ValueError, match=r"additon.*addition"):
    loop.train(config, tmp_path / "b")


def test_a_directory_that_cannot_be_written_is_refused_first(tmp_path):
  (tmp_path / "file").write_text("")
  # The model does not exist either: the directory is looked at before it.
  config = _with(tiny.get_config(), {"model": "nowhere"})
  with pytest.raises(ValueError, match="file/run cannot be written"):
    loop.train(config, tmp_path / "file" / "run")


def test_a_directory_belongs_to_one_config(tmp_path):
  config = tiny.get_config()
  workdir.claim(tmp_path, config)
  workdir.claim(tmp_path, tiny.get_config())
  other = _with(config, {"optimizer.rank": 8, "seed": 1})
  with pytest.raises(ValueError) as error:
    workdir.claim(tmp_path, other)
  assert "optimizer.rank: 4 there, 8 now" in str(error.value)
  assert "seed: 0 there, 1 now" in str(error.value)
  assert "prompts" not in str(error.value)  # Only what differs.
  found = workdir.load_config(tmp_path)
  assert found.to_dict() == tiny.get_config().to_dict()


def test_a_directory_without_a_run_is_named(tmp_path):
  with pytest.raises(ValueError, match="holds no run"):
    workdir.load_config(tmp_path)


def _params():
  return {
      "layers": {
          "q_proj": {"kernel": jnp.ones((2, 8, 6))},
          "norm": {"scale": jnp.ones((2, 8))},
      },
      "embed": {"embedding": jnp.ones((5, 8))},
  }


def _step(config, params):
  """One update of the optimizer; the loss pulls every parameter to 0."""
  tx = UpdateSettings.of_config(config).make_optimizer()
  params = optimizers.init_params(
      UpdateSettings.of_config(config).optimizer, params
  )
  opt_state = logra_jax.init(tx, params)
  x = jax.random.normal(jax.random.key(0), (4, 8))

  def loss_fn(params):
    kernel = params["layers"]["q_proj"]["kernel"]
    y = jax.vmap(lambda k: logra_jax.dense(x, k))(kernel)
    rest = params["layers"]["norm"]["scale"], params["embed"]["embedding"]
    return jnp.sum(jnp.square(y)) + sum(jnp.sum(r) for r in rest)

  _, grads = logra_jax.value_and_grad(loss_fn)(params, opt_state)
  predicts = lambda updates: jnp.float32(config.kl.budget)
  updates, opt_state = tx.update(grads, opt_state, params, probe=predicts)
  return lora.merge(logra_jax.apply_updates(params, updates, opt_state))


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
def test_each_optimizer_trains_the_targets_and_nothing_else(name):
  # The gradient has rank 1: what GaLore finds beside that is rounding.
  changes = {"optimizer.name": name, "optimizer.rank": 1}
  config = _with(quickstart.get_config(), changes)
  before = _params()
  after = _step(config, before)
  kernel = np.asarray(after["layers"]["q_proj"]["kernel"])
  assert np.linalg.norm(kernel) < np.sqrt(2 * 8 * 6)  # Towards 0.
  np.testing.assert_array_equal(
      after["layers"]["norm"]["scale"], before["layers"]["norm"]["scale"]
  )
  np.testing.assert_array_equal(
      after["embed"]["embedding"], before["embed"]["embedding"]
  )


def test_dense_adam_is_optax_adam_on_the_targets():
  config = _with(quickstart.get_config(), {"optimizer.name": "dense_adam"})
  params = _params()
  kernel = params["layers"]["q_proj"]["kernel"]
  tx = optax.adam(1e-5, b1=0.9, b2=0.95)
  x = jax.random.normal(jax.random.key(0), (4, 8))
  grad = jax.grad(lambda k: jnp.sum(jnp.square(x @ k)))(kernel)
  updates, _ = tx.update(grad, tx.init(kernel))
  found = _step(config, params)["layers"]["q_proj"]["kernel"]
  np.testing.assert_allclose(found, kernel + updates, rtol=1e-6)


def test_the_annealed_budget_is_the_librarys_cosine():
  config = _with(
      quickstart.get_config(),
      {"kl.budget": 2e-4, "kl.final_budget": 2e-5, "kl.anneal_updates": 300},
  )
  params = _params()
  tx = UpdateSettings.of_config(config).make_optimizer()
  state = tx.init(params)
  grads = jax.tree.map(lambda x: None, params)
  grads["layers"]["q_proj"]["kernel"] = jnp.ones((2, 8, 6))
  budgets = []
  for _ in range(3):
    _, state = tx.update(grads, state, params, probe=lambda u: jnp.float32(1.0))
    budgets.append(float(logra_jax.diagnostics(state)["budget"]))
  # Half a cosine from 2e-4 to 2e-5 over 300 updates.
  expected = 2e-5 + 9e-5 * (1 + np.cos(np.pi * np.arange(3) / 300))
  np.testing.assert_allclose(budgets, expected, rtol=1e-5)
