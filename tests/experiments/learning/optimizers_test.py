"""Tests of the optimizers against those of optax, layer by layer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.learning import optimizers
from experiments.learning.train_step import UpdateSettings
from experiments.models import lora
import logra_jax
from tests.helpers.configs import tiny_config

LAYERS, RATE, B1, B2, EPS, DECAY = 3, 1e-3, 0.9, 0.95, 1e-8, 0.1
STEPS = 5
DENSE = ("dense_adam", "dense_sgd", "galore", "muon")


def _settings(**changes):
  """Settings without a budget; `optimizer__rank=8` changes optimizer.rank."""
  changes = {name.replace("__", "."): value for name, value in changes.items()}
  config = tiny_config(
      **{
          "optimizer.learning_rate": RATE,
          "optimizer.rank": 4,
          "optimizer.weight_decay": DECAY,
          "optimizer.galore_gap": 2,
          "kl.enabled": False,
      }
      | changes
  )
  return UpdateSettings.of_config(config)


def _draw(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def _params():
  """A wide and a tall stack of kernels, and parameters that are not targets."""
  return {
      "layers": {
          "q_proj": {
              "kernel": _draw(1, LAYERS, 8, 6),
              "bias": _draw(2, LAYERS, 6),
          },
          "down_proj": {"kernel": _draw(3, LAYERS, 5, 8)},
          "norm": {"scale": _draw(4, LAYERS, 8)},
      },
      "embed": {"embedding": _draw(5, 7, 8)},
  }


def _gradients(params, step):
  return jax.tree.map(
      lambda x: jax.random.normal(
          jax.random.fold_in(jax.random.key(step), x.size), x.shape
      ),
      params,
  )


def _run(tx, params, gradients=_gradients, **extra):
  """Parameters after some steps with `logra_jax.apply_updates`."""
  state = logra_jax.init(tx, params)
  update = jax.jit(lambda *args: tx.update(*args, **extra))
  for step in range(STEPS):
    updates, state = update(gradients(params, step), state, params)
    params = logra_jax.apply_updates(params, updates, state)
  return params


def _run_layers(tx, kernel, layer, gradients):
  """One matrix of the stack after the same steps with optax alone."""
  w = kernel[layer]
  state = tx.init(w)
  update = jax.jit(tx.update)
  for step in range(STEPS):
    updates, state = update(gradients(step)[layer], state, w)
    w = optax.apply_updates(w, updates)
  return w


def _of_optax(name):
  """The optimizer of one matrix as optax itself offers it."""
  if name == "dense_adam":
    return optax.adamw(RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)
  if name == "dense_sgd":
    return optax.chain(
        optax.trace(B1),
        optax.add_decayed_weights(DECAY),
        optax.scale_by_learning_rate(RATE),
    )
  if name == "galore":
    return optax.contrib.galore(
        RATE,
        rank=4,
        update_proj_gap=2,
        base_optimizer=optax.scale_by_adam(b1=B1, b2=B2, eps=EPS),
        weight_decay=DECAY,
    )
  return optax.contrib.muon(
      RATE, beta=B1, eps=EPS, weight_decay=DECAY, consistent_rms=0.2
  )


@pytest.mark.parametrize("name", DENSE)
def test_each_layer_is_trained_as_by_optax_on_it_alone(name):
  params = _params()
  after = _run(_settings(optimizer__name=name).make_optimizer(), params)
  for module in ("q_proj", "down_proj"):
    kernel = params["layers"][module]["kernel"]
    gradients = lambda step, module=module: _gradients(params, step)["layers"][
        module
    ]["kernel"]
    for layer in range(LAYERS):
      expected = _run_layers(_of_optax(name), kernel, layer, gradients)
      trained = after["layers"][module]["kernel"][layer]
      assert np.abs(expected - kernel[layer]).max() > RATE
      np.testing.assert_allclose(trained, expected, rtol=1e-5, atol=1e-6)


def test_galore_keeps_thin_moments_and_projects_only_when_due():
  """A branch saves most updates the singular value decomposition."""
  params = _params()
  settings = _settings(optimizer__name="galore", optimizer__rank=2)
  tx = settings.make_optimizer()
  state = tx.init(params)
  shapes = {x.shape for x in jax.tree.leaves(state) if x.ndim}
  # Projectors of the longer side, and moments [rank, n] and [m, rank].
  assert shapes == {(3, 8, 2), (3, 2, 6), (3, 5, 2)}
  text = jax.jit(tx.update).lower(params, state, params).as_text()
  assert "stablehlo.case" in text
  moved = []
  for step in range(4):
    before = state
    _, state = tx.update(_gradients(params, step), state, params)
    changed = jax.tree.map(lambda x, y: (x != y).any(), state, before)
    moved.append(
        any(
            c
            for c, x in zip(
                jax.tree.leaves(changed), jax.tree.leaves(state), strict=True
            )
            if x.shape == (3, 8, 2)  # Only projectors have this shape.
        )
    )
  # The first update projects, and every second one after it.
  assert moved == [True, False, True, False]


def _sketches(params, state):
  """Sketched gradients of a linear loss, whose gradients do not change.

  They are sketches of `_gradients(params, 0)`.
  """
  weights = _gradients(params, 0)
  eye = lambda kernel: jnp.eye(kernel.shape[-2])

  def loss_fn(params):
    total = 0.0
    flat, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda x: isinstance(x, logra_jax.Kernel)
    )
    for (path, leaf), w in zip(flat, jax.tree.leaves(weights), strict=True):
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      if name.endswith("_proj/kernel"):
        y = jax.vmap(lambda k: logra_jax.dense(eye(k), k))(leaf)
        total += jnp.sum(y * w)
      else:
        total += jnp.sum(leaf * w)
    return total

  return logra_jax.value_and_grad(loss_fn)(params, state)[1]


@pytest.mark.parametrize(
    "name",
    [
        "dense_sgd",
        "galore",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("dense_adam", "logra", "lora", "muon")
        ),
    ],
)
@pytest.mark.parametrize(
    "others", [pytest.param("frozen", marks=pytest.mark.slow), "adam"]
)
def test_the_others_are_frozen_or_trained_by_adam(name, others):
  plain = _params()
  settings = _settings(optimizer__name=name, optimizer__others=others)
  tx = settings.make_optimizer()
  params = optimizers.init_params(settings.optimizer, plain)
  state = logra_jax.init(tx, params)
  after = params
  adam = optax.adam(RATE, b1=0.9, b2=B2, eps=EPS)
  expected, adam_state = plain, adam.init(plain)
  for _ in range(3):
    grads = _gradients(params, 0) if name == "lora" else _sketches(plain, state)
    updates, state = tx.update(grads, state, after)
    after = logra_jax.apply_updates(after, updates, state)
    steps, adam_state = adam.update(_gradients(plain, 0), adam_state)
    expected = optax.apply_updates(expected, steps)
  merged = lora.merge(after)
  for module, leaf in (("q_proj", "bias"), ("norm", "scale")):
    end, start = merged["layers"][module][leaf], plain["layers"][module][leaf]
    wanted = expected["layers"][module][leaf] if others == "adam" else start
    np.testing.assert_allclose(end, wanted, rtol=1e-6, atol=1e-7)
    assert (end != start).any() == (others == "adam")
  changed = (
      merged["layers"]["q_proj"]["kernel"]
      != plain["layers"]["q_proj"]["kernel"]
  )
  assert changed.any()
  if others == "frozen":
    assert updates["embed"]["embedding"] is None


def test_lora_trains_adapters_by_adamw():
  settings = _settings(optimizer__name="lora", optimizer__lora_alpha=2.0)
  plain = _params()
  params = optimizers.init_params(settings.optimizer, plain)
  node = params["layers"]["q_proj"]["kernel"]
  assert (node.a.shape, node.scaling) == ((LAYERS, 8, 4), 0.5)
  after = _run(settings.make_optimizer(), params)
  trained = after["layers"]["q_proj"]["kernel"]
  np.testing.assert_array_equal(trained.kernel, node.kernel)
  for name in ("a", "b"):
    start = getattr(node, name)
    gradients = lambda step, name=name: getattr(
        _gradients(params, step)["layers"]["q_proj"]["kernel"], name
    )
    expected = _run_layers(
        _of_optax("dense_adam"), start, slice(None), gradients
    )
    np.testing.assert_allclose(getattr(trained, name), expected, rtol=1e-5)
  np.testing.assert_array_equal(
      after["layers"]["norm"]["scale"], plain["layers"]["norm"]["scale"]
  )


def test_lora_without_adapters_is_an_error():
  tx = _settings(optimizer__name="lora").make_optimizer()
  with pytest.raises(ValueError, match=r"nothing to train.*init_params"):
    tx.init(_params())


@pytest.mark.parametrize("name", DENSE)
def test_a_budget_scales_the_step_of_the_learning_rate(name):
  params = _params()
  grads = _gradients(params, 0)
  steps = []
  for enabled in (False, True):
    tx = _settings(
        optimizer__name=name,
        kl__enabled=enabled,
        kl__budget=4e-3,
        kl__final_budget=4e-3,
    ).make_optimizer()
    # The predicted KL is a quarter of the budget, so the step is doubled.
    extra = {"probe": lambda u: jnp.float32(1e-3)} if enabled else {}
    updates, _ = tx.update(grads, tx.init(params), params, **extra)
    steps.append(updates["layers"]["q_proj"]["kernel"])
  np.testing.assert_allclose(steps[1], 2 * steps[0], rtol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, B1])
@pytest.mark.parametrize("name", sorted(optimizers.PRECONDITIONERS))
def test_sketches_are_preconditioned(name, momentum):
  row_adam = lambda keep: logra_jax.scale_by_row_adam(B2, EPS, keep)
  trace = optax.trace(momentum) if momentum else optax.identity()
  inner = {
      "row_adam": optax.chain(trace, row_adam(False)),
      "norm_preserving": optax.chain(trace, row_adam(True)),
      "adam": optax.scale_by_adam(momentum, B2, EPS),
      "none": trace,
  }[name]
  expected = optax.chain(
      logra_jax.sketch(8, refresh=False, inner=inner, weight_decay=DECAY),
      optax.scale_by_learning_rate(RATE),
  )
  settings = _settings(
      optimizer__preconditioner=name,
      optimizer__momentum=momentum,
      optimizer__rank=8,
  )
  params = _params()

  def steps(tx):
    state, out = logra_jax.init(tx, params), []
    for _ in range(2):
      grads = _sketches(params, state)
      updates, state = tx.update(grads, state, params)
      out.append(updates["layers"]["q_proj"]["kernel"])
    return out

  chex.assert_trees_all_close(
      steps(settings.make_optimizer()), steps(expected), rtol=1e-6
  )


def test_the_learning_rate_is_part_of_the_state():
  params = _params()
  grads = _gradients(params, 0)

  def step(built_with, state_of):
    make = lambda rate: _settings(
        optimizer__name="dense_adam", optimizer__learning_rate=rate
    ).make_optimizer()
    state = make(state_of).init(params)
    return make(built_with).update(grads, state, params)[0]

  chex.assert_trees_all_equal(step(1e-3, 0.5), step(0.5, 0.5))


@pytest.mark.slow
def test_update_ratio_without_a_budget_descends_by_that_ratio():
  ratio = 0.01
  settings = _settings(
      optimizer__learning_rate=0.0,
      optimizer__update_ratio=ratio,
      optimizer__weight_decay=0.0,
      optimizer__distribution="orthonormal",
      optimizer__rank=8,
  )
  params = _params()
  tx = settings.make_optimizer()
  state = logra_jax.init(tx, params)
  grads = _sketches(params, state)
  updates, state = tx.update(grads, state, params)
  after = logra_jax.apply_updates(params, updates, state)
  kernels = lambda tree: [
      tree["layers"][name]["kernel"] for name in ("q_proj", "down_proj")
  ]
  step = jax.tree.map(jnp.subtract, kernels(after), kernels(params))
  norm = optax.tree.norm
  np.testing.assert_allclose(
      norm(step), ratio * norm(kernels(params)), rtol=0.01
  )
  # At full rank the reconstruction points along the dense gradient.
  dense = kernels(_gradients(params, 0))
  assert optax.tree.vdot(step, dense) < 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"name": "sgd"}, r"optimizer.name='sgd'.*'galore', 'logra', 'lora'"),
        ({"others": "adamw"}, r"optimizer.others='adamw'.*'frozen' or 'adam'"),
        ({"rank": 0}, r"optimizer.rank=0 must be at least 1"),
        ({"lora_alpha": 0.0}, r"optimizer.lora_alpha=0.0 must be positive"),
        ({"galore_gap": 0}, r"optimizer.galore_gap=0 must be at least 1"),
        ({"momentum": 1.0}, r"optimizer.momentum=1.0 must be in"),
        ({"beta2": -0.1}, r"optimizer.beta2=-0.1 must be in"),
        ({"eps": 0.0}, r"optimizer.eps=0.0 must be positive"),
        ({"weight_decay": float("nan")}, r"optimizer.weight_decay=nan"),
        ({"learning_rate": float("inf")}, r"optimizer.learning_rate=inf"),
        ({"learning_rate": 0.0}, r"optimizer.learning_rate=0.0 and"),
        (
            {"learning_rate": 0.0, "update_ratio": 1e-4, "others": "adam"},
            r"optimizer.update_ratio=0.0001 .*others='adam'",
        ),
        (
            {"learning_rate": 0.0, "update_ratio": 1e-4, "name": "muon"},
            r"optimizer.update_ratio=0.0001 .*name='muon'",
        ),
        (
            {"preconditioner": "muon"},
            r"optimizer.preconditioner='muon'.*'adam'",
        ),
        (
            {"preconditioner": "adam", "refresh": True, "momentum": 0.0},
            r"optimizer.preconditioner='adam'.*refresh",
        ),
        ({"distribution": "uniform"}, r"config.optimizer: distribution='unif"),
    ],
)
def test_bad_values_are_refused_by_name(changes, match):
  changes = {f"optimizer__{k}": v for k, v in changes.items()}
  with pytest.raises(ValueError, match=match):
    _settings(**changes).make_optimizer()


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
def test_init_works_on_shapes_alone(name):
  settings = _settings(optimizer__name=name)
  tx = settings.make_optimizer()

  def make(params):
    params = optimizers.init_params(settings.optimizer, params)
    return params, logra_jax.init(tx, params)

  shapes = jax.eval_shape(make, jax.eval_shape(_params))
  jax.tree.map(
      lambda s, x: np.testing.assert_equal(
          (s.shape, s.dtype), (x.shape, x.dtype)
      ),
      shapes,
      make(_params()),
  )
