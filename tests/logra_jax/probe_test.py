"""Tests of predicted and realised KL: accuracy, masks, memory, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from tests.helpers import linear_policy as lp
from tests.helpers import small_policy as sp


def softmax64(z):
  e = np.exp(z - z.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def quadratic64(z, dz, temperature):
  z, dz = (np.asarray(x, np.longdouble) / temperature for x in (z, dz))
  p = softmax64(z)
  dz = dz - (p * dz).sum(-1, keepdims=True)
  return (0.5 * (p * dz**2).sum(-1)).astype(np.float64)


def exact64(z, new_z, temperature=1.0):
  """Σ q - p - p log(q/p) in long double, by a series where it would cancel."""
  z, new_z = (np.asarray(x, np.longdouble) / temperature for x in (z, new_z))
  p, q = softmax64(z), softmax64(new_z)
  norm = lambda x: np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1))
  gap = (new_z - z) - (norm(new_z) + new_z.max(-1) - norm(z) - z.max(-1))[
      ..., None
  ]
  series = gap**2 / 2 + gap**3 / 6 + gap**4 / 24
  with np.errstate(over="ignore"):
    terms = np.where(np.abs(gap) < 1e-3, p * series, q - p - p * gap)
  return terms.sum(-1).astype(np.float64)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0])
@pytest.mark.parametrize("logit_scale", [1.0, 30.0, 1000.0])
def test_quadratic_kl_is_that_of_float64(logit_scale, size, temperature):
  rng = np.random.default_rng(0)
  z = np.float32(rng.normal(size=(5, 300)) * logit_scale)
  dz = np.float32(rng.normal(size=z.shape) * size)
  got = logra_jax.quadratic_kl(jnp.array(z), jnp.array(dz), temperature)
  assert got.shape == (5,) and got.dtype == jnp.float32
  wanted = quadratic64(z, dz, temperature)
  np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-25)


def test_a_common_shift_of_all_logits_is_no_change():
  z = jax.random.normal(jax.random.key(0), (4, 50))
  shift = jnp.full_like(z, 3.0)
  assert float(jnp.max(logra_jax.quadratic_kl(z, shift))) < 1e-11
  assert float(jnp.max(jnp.abs(logra_jax.exact_kl(z, z + 0.5)))) < 1e-12


@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-2, 0.1, 0.3, 1, 10, 100, 1e3])
@pytest.mark.parametrize("logit_scale", [1.0, 10.0, 100.0, 1000.0])
def test_exact_kl_is_that_of_float64(logit_scale, size):
  rng = np.random.default_rng(1)
  z = np.float32(rng.normal(size=(8, 200)) * logit_scale)
  new_z = np.float32(z + np.float32(rng.normal(size=z.shape) * size))
  got = logra_jax.exact_kl(jnp.array(z), jnp.array(new_z))
  np.testing.assert_allclose(got, exact64(z, new_z), rtol=1e-4, atol=1e-18)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_exact_kl_takes_a_temperature(temperature):
  rng = np.random.default_rng(2)
  z, new_z = np.float32(rng.normal(size=(2, 6, 40)) * 3)
  got = logra_jax.exact_kl(jnp.array(z), jnp.array(new_z), temperature)
  np.testing.assert_allclose(got, exact64(z, new_z, temperature), rtol=1e-5)


def test_a_tiny_kl_keeps_its_relative_accuracy():
  """A KL of 1e-12 is far below the rounding of float32 log-probabilities."""
  rng = np.random.default_rng(3)
  z = np.float32(rng.normal(size=(16, 5000)) * 2)
  new_z = np.float32(z + np.float32(rng.normal(size=z.shape) * 2e-6))
  wanted = exact64(z, new_z)
  assert 1e-13 < wanted.max() < 1e-11
  got = logra_jax.exact_kl(jnp.array(z), jnp.array(new_z))
  np.testing.assert_allclose(got, wanted, rtol=1e-3)
  # The textbook formula in float32 loses all digits.
  log_p, log_q = jax.nn.log_softmax(z), jax.nn.log_softmax(new_z)
  naive = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
  assert np.max(np.abs(naive - wanted) / wanted) > 1


def test_excluded_tokens_and_far_policies_have_the_kl_they_have():
  inf = jnp.inf
  kl = lambda z, new_z: float(
      logra_jax.exact_kl(jnp.array(z), jnp.array(new_z))
  )
  assert kl([0.0, 0.0, -inf], [0.0, 0.0, -inf]) == 0
  # Mass on a token that the old policy nearly excludes: KL = log(1 + e³).
  np.testing.assert_allclose(
      kl([0.0, -300.0, -inf], [0.0, 3.0, -inf]), np.log1p(np.exp(3)), rtol=1e-6
  )
  np.testing.assert_allclose(kl([0.0, -inf], [0.0, 0.0]), np.log(2), rtol=1e-6)
  np.testing.assert_allclose(kl([0.0, -100.0], [-100.0, 0.0]), 100, rtol=1e-6)
  assert kl([0.0, 0.0], [0.0, -inf]) == np.inf


TX = optax.chain(
    logra_jax.sketch(
        rank=3,
        others=optax.adam(1.0),
        weight_decay=20.0,
        factor_dtype=jnp.float32,  # rounding would change the direction
    ),
    optax.scale_by_learning_rate(1e-3),
)


@functools.cache
def fixed_proposal():
  """Returns `params, opt_state, batch, updates, new_state` of a first step."""

  @jax.jit
  def propose():
    params, batch = sp.make_params(), sp.make_batch()
    opt_state = TX.init(params)
    _, grads = logra_jax.value_and_grad(sp.loss_fn)(params, opt_state, batch)
    updates, new_state = TX.update(grads, opt_state, params)
    return params, opt_state, batch, updates, new_state

  return propose()


call = jax.jit(lambda probe, updates: probe(updates))
realised = jax.jit(logra_jax.realised_kl)
merge = jax.jit(logra_jax.apply_updates)


def policy_probe(hidden=sp.hidden_fn, head=sp.head_fn, batch=None, **kwargs):
  """Returns a probe of the transformer policy."""
  params, opt_state, default, _, _ = fixed_proposal()
  return logra_jax.kl_probe(
      hidden, params, opt_state, batch or default, head_fn=head, **kwargs
  )


@functools.cache
def linear_proposal():
  """Like `fixed_proposal`, for a linear policy, which compiles quickly."""

  @jax.jit
  def propose(params, batch):
    tx = optax.chain(
        logra_jax.sketch(rank=3, others=optax.sgd(1.0), weight_decay=0.1),
        optax.scale_by_learning_rate(0.1),
    )
    opt_state = tx.init(params)
    _, grads = logra_jax.value_and_grad(lp.loss_fn)(params, opt_state, batch)
    return opt_state, *tx.update(grads, opt_state, params)

  params, batch = lp.make_params(), lp.make_batch()
  opt_state, updates, _ = propose(params, batch)
  return params, opt_state, batch, updates


def make_probe(batch=None, logits=lp.logits_fn, **kwargs):
  params, opt_state, default, _ = linear_proposal()
  return logra_jax.kl_probe(
      logits, params, opt_state, batch or default, **kwargs
  )


def predict(batch=None, **kwargs):
  return float(call(make_probe(batch, **kwargs), linear_proposal()[3]))


def test_predicted_kl_is_right_to_second_order():
  """The error is of third order, with sketches, dense updates and decay."""
  params, _, _, updates, new_state = fixed_proposal()
  predicted, exact = [], []
  for scale in (8.0, 4.0, 2.0, 1.0):
    scaled = optax.tree.scale(scale, updates)
    predicted.append(call(policy_probe(), scaled))
    new_params = merge(params, scaled, new_state)
    exact.append(realised(policy_probe(), new_params))
  predicted, exact = (np.array(x, np.float64) for x in (predicted, exact))
  np.testing.assert_allclose(predicted[1:], predicted[:-1] / 4, rtol=1e-5)
  np.testing.assert_allclose(predicted[-1], exact[-1], rtol=0.1)
  error = np.abs(predicted - exact)
  assert np.all(error[:-1] >= 6 * error[1:]), error
  # A prediction that is off by 10 % has an error of second order.
  wrong = np.abs(1.1 * predicted - exact)
  assert not np.all(wrong[:-1] >= 6 * wrong[1:]), wrong


def test_every_part_of_the_update_is_in_the_prediction():
  updates = fixed_proposal()[3]
  is_update = lambda x: isinstance(x, logra_jax.Update)
  is_thin = lambda path: "_proj" in str(path) and "kernel" in str(path)

  def only(part):
    def keep(path, update):
      thin = is_thin(path)
      value = update.value * (part == ("thin" if thin else "dense"))
      return logra_jax.Update(value, update.scale * (part == "decay"))

    return jax.tree_util.tree_map_with_path(keep, updates, is_leaf=is_update)

  predicted = lambda part: float(call(policy_probe(), only(part)))
  whole = float(call(policy_probe(), updates))
  parts = [predicted(part) for part in ("thin", "dense", "decay")]
  assert min(parts) > 1e-3 * whole and len(set(parts)) == 3, parts
  assert predicted("none") == 0


def test_only_generated_tokens_count():
  """Logits on prompt and padding are ignored, even if they are NaN."""
  mask = lp.make_batch()["completion_mask"]

  def spoiled(params, batch):
    logits = lp.logits_fn(params, batch)
    # The product affects the tangent as well.
    return jnp.where(batch["kept"][..., None], logits, logits * batch["junk"])

  def predicted(junk, kept=mask):
    more = {"junk": jnp.float32(junk), "kept": kept}
    return predict(lp.make_batch() | more, logits=spoiled)

  values = [predicted(junk) for junk in (1.0, -3e38, jnp.inf, jnp.nan)]
  assert np.isfinite(values[0]) and len(set(values)) == 1, values
  assert np.isnan(
      predicted(jnp.nan, kept=~mask)
  )  # NaN is noticed inside the mask


def test_padding_tokens_change_nothing():
  _, _, batch, updates, _ = fixed_proposal()

  def predicted(kept):
    tokens = jnp.where(kept, batch["tokens"], 7)
    return float(call(policy_probe(batch=batch | {"tokens": tokens}), updates))

  assert not bool(batch["valid"].all())
  assert predicted(batch["valid"]) == predicted(jnp.ones_like(batch["valid"]))
  # Prompt tokens do matter, because the completion attends to them.
  assert predicted(batch["completion_mask"]) != predicted(batch["valid"])


def test_the_mask_selects_the_tokens_averaged_over():
  batch = linear_proposal()[2]
  mask = np.asarray(batch["completion_mask"])
  alone = {}
  for index in np.argwhere(mask):
    only = np.zeros_like(mask)
    only[tuple(index)] = True
    alone[tuple(index)] = predict(batch | {"completion_mask": only})
  assert len(set(alone.values())) == mask.sum() > 1
  np.testing.assert_allclose(
      np.mean(list(alone.values())), predict(), rtol=1e-5
  )


@pytest.mark.parametrize("chunk_size", [1, 5, 12, 1000])
def test_any_chunk_size_gives_the_same(chunk_size):
  """In this policy the target and the bias are in the head."""
  got = predict(logits=lp.hidden_fn, head_fn=lp.head_fn, chunk_size=chunk_size)
  np.testing.assert_allclose(got, predict(), rtol=1e-5)


def test_the_head_of_a_transformer_may_be_apart():
  updates = fixed_proposal()[3]
  whole = call(policy_probe(sp.logits_fn, None), updates)
  np.testing.assert_allclose(call(policy_probe(), updates), whole, rtol=1e-5)


def test_no_logits_of_all_tokens_are_alive_at_once():
  tokens, vocab = sp.BATCH * sp.LENGTH, sp.VOCAB
  chunked = policy_probe(chunk_size=4)
  whole = policy_probe(sp.logits_fn, None, chunk_size=4)
  text = (
      lambda probe: call.lower(probe, fixed_proposal()[3]).compile().as_text()
  )
  assert max(sp.buffers(text(chunked))) < tokens * vocab
  assert 4 * vocab in sp.buffers(text(chunked))
  assert tokens * vocab in sp.buffers(text(whole))  # the control


def test_no_dense_update_is_formed():
  """The tangent of a target is computed from the thin factor."""
  d_in, d_out, rank = 512, 384, 4
  layer = lambda x: {"q_proj": {"kernel": x}}
  batch = {
      "x": np.ones((2, 3, d_in), np.float32),
      "completion_mask": np.ones((2, 3), bool),
  }
  params = layer(jax.ShapeDtypeStruct((d_in, d_out), jnp.float32))
  factor = jax.ShapeDtypeStruct((rank, d_out), jnp.float32)
  logits = lambda p, b: logra_jax.dense(b["x"], p["q_proj"]["kernel"])
  tx = logra_jax.sketch(rank=rank)

  def thin(params, factor):
    update = layer(logra_jax.Update(factor, jnp.float32(1.0)))
    return logra_jax.kl_probe(logits, params, tx.init(params), batch)(update)

  def dense(params, factor):  # the same with a tangent of full shape
    basis = jnp.ones((rank, d_in))
    change = layer(jnp.einsum("ri,ro->io", basis, factor))
    f = lambda p: jnp.sin(logits(p, batch))
    return jnp.mean(logra_jax.quadratic_kl(*jax.jvp(f, (params,), (change,))))

  def temporary_bytes(f):
    compiled = jax.jit(f).lower(params, factor).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary_bytes(thin) < 4 * d_in * d_out / 4
  assert temporary_bytes(dense) >= 4 * d_in * d_out


def test_a_temperature_divides_logits_and_tangents():
  hot = lambda params, batch: lp.logits_fn(params, batch) / 2.5
  np.testing.assert_allclose(
      predict(temperature=2.5), predict(logits=hot), rtol=1e-5
  )
  assert predict(temperature=2.5) < predict()


def test_the_prediction_is_the_quadratic_form_of_the_directional_derivative():
  """Compares with float64 for dense updates, which are known explicitly."""
  params, _, batch, _ = linear_proposal()
  updates = lp.make_params(seed=9)
  probe = logra_jax.kl_probe(lp.logits_fn, params, optax.EmptyState(), batch)
  x = np.asarray(batch["x"], np.float64)
  at = lambda p: x @ np.float64(p["q_proj"]["kernel"]) + np.float64(
      p["q_proj"]["bias"]
  )
  kl = quadratic64(at(params), at(updates), 1.0)
  wanted = kl[np.asarray(batch["completion_mask"])].mean()
  np.testing.assert_allclose(call(probe, updates), wanted, rtol=1e-5)


def test_a_half_precision_policy_is_probed_in_its_own_dtypes():
  params, opt_state, batch, updates = linear_proposal()
  half = lambda tree: jax.tree.map(
      lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree
  )
  probe = logra_jax.kl_probe(lp.logits_fn, half(params), opt_state, half(batch))
  got = call(probe, updates)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, predict(), rtol=0.05)


def test_a_probe_passes_through_jit():
  params, opt_state, batch, updates = linear_proposal()
  traces = []

  @jax.jit
  def make(params, opt_state, batch):
    traces.append("make")
    return logra_jax.kl_probe(lp.logits_fn, params, opt_state, batch)

  @jax.jit
  def use(probe, updates):
    traces.append("use")
    return probe(updates)

  for _ in range(2):
    probe = make(params, opt_state, batch)
    assert isinstance(probe, logra_jax.KLProbe)
    assert float(use(probe, updates)) == predict()
  assert traces == ["make", "use"]
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(probe))


def test_realised_kl_is_the_exact_kl_of_all_logits():
  params, _, batch, _, _ = fixed_proposal()
  new_params = sp.make_params(seed=5)
  probe = policy_probe(temperature=0.7, chunk_size=5)
  logits = jax.jit(sp.logits_fn)
  old, new = (np.asarray(logits(p, batch)) for p in (params, new_params))
  kl = exact64(old, new, 0.7)
  wanted = kl[np.asarray(batch["completion_mask"])].mean()
  np.testing.assert_allclose(realised(probe, new_params), wanted, rtol=1e-4)
  assert float(realised(probe, params)) < 1e-12


def test_realised_kl_masks_as_the_prediction_does():
  def spoiled(params, batch):
    keep = batch["completion_mask"][..., None]
    return jnp.where(keep, lp.logits_fn(params, batch), jnp.nan)

  new_params = lp.make_params(seed=5)
  wanted = realised(make_probe(), new_params)
  got = realised(make_probe(logits=spoiled), new_params)
  assert float(got) == float(wanted) > 0


def test_a_probe_needs_a_completion_mask():
  batch = lp.make_batch()
  del batch["completion_mask"]
  with pytest.raises(ValueError, match="completion_mask"):
    make_probe(batch)
  with pytest.raises(ValueError, match="completion_mask"):
    make_probe((batch["x"], batch["action"]))


def test_a_mask_without_a_generated_token_is_refused_where_it_is_known():
  batch = lp.make_batch()
  empty = jnp.zeros_like(batch["completion_mask"])
  with pytest.raises(ValueError, match=r"completion_mask \(3, 4\)"):
    make_probe(batch | {"completion_mask": empty})
  with pytest.raises(ValueError, match="no generated token"):
    make_probe(batch | {"completion_mask": np.zeros((3, 4), bool)})


def test_under_jit_a_mask_without_a_generated_token_gives_nan():
  _, _, batch, updates = linear_proposal()

  @jax.jit
  def predicted(mask):
    return make_probe(batch | {"completion_mask": mask})(updates)

  mask = batch["completion_mask"]
  assert np.isnan(predicted(jnp.zeros_like(mask)))
  assert np.isfinite(predicted(mask))


def test_a_mask_of_another_shape_is_refused():
  batch = lp.make_batch()
  mask = batch["completion_mask"]
  for wrong in (mask[:, :-1], mask.T, mask[..., None]):
    probe = make_probe(batch | {"completion_mask": wrong})
    with pytest.raises(ValueError, match="completion_mask"):
      jax.eval_shape(probe, linear_proposal()[3])


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_samples_nothing_is_refused(temperature):
  with pytest.raises(ValueError, match=f"temperature={temperature}"):
    make_probe(temperature=temperature)


@pytest.mark.parametrize("chunk_size", [0, -5, 2.5])
def test_a_chunk_of_no_token_is_refused(chunk_size):
  with pytest.raises(ValueError, match=f"chunk_size={chunk_size}"):
    make_probe(chunk_size=chunk_size)


@pytest.mark.parametrize("values", [(0, 2), (0.0, 0.5), (0.0, -3.0)])
def test_a_mask_of_numbers_is_read_as_bools(values):
  batch = lp.make_batch()
  mask = np.asarray(batch["completion_mask"])
  params = lp.make_params()
  tx = logra_jax.sketch(3)
  state = tx.init(params)
  _, grads = logra_jax.value_and_grad(lp.loss_fn)(params, state, batch)
  updates, _ = tx.update(grads, state, params)

  def predict(mask):
    probe = logra_jax.kl_probe(
        lp.logits_fn, params, state, batch | {"completion_mask": mask}
    )
    return float(probe(updates))

  expected = predict(jnp.asarray(mask))
  assert expected > 0
  assert predict(jnp.where(mask, values[1], values[0])) == expected
