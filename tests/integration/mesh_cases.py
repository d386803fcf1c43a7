"""Training on meshes of eight simulated devices; run by `mesh_test`."""

import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import tiny
from experiments.learning import batches, compiled_step
from experiments.learning.batches import BatchSettings
from experiments.learning.train_step import UpdateSettings
from experiments.models import decoder, load
from experiments.models import tiny as tiny_model
from experiments.models.config import DecoderConfig
from experiments.parallel import sharding
from experiments.planning import hlo_cost, hlo_text
from experiments.rollouts import decode_steps
from experiments.rollouts.rollout import Rollout
from experiments.rollouts.sampling import Sampling
from experiments.runs import loop, metric_names, record
import logra_jax

PROMPT, NEW, VOCAB = 6, 5, 64

# fsdp=8 divides neither side of a feed-forward kernel, and tensor=4 is more
# than the number of key-value heads.
SHAPES = {
    "vocab_size": VOCAB,
    "d_model": 36,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 6,
    "d_ff": 44,
    "max_length": 32,
}
# Neither block, of 3 or 5 tokens, divides the rows of 16 tokens.
VARIANTS = {
    "untied, trained": (
        {"qkv_bias": True},
        # A rank that fsdp=2 and tensor=4, or fsdp=8, can split.
        {
            "optimizer.others": "adam",
            "attention_block": 3,
            "optimizer.rank": 8,
        },
    ),
    "tied, frozen, blocks": (
        {"tied_head": True, "qk_norm": True},
        {"optimizer.rank": 3, "token_block": 5, "remat": True},
    ),
}
# Each case compiles an update. These two show the rules, and the slow ones in
# `MORE` the corner cases.
CASES = [
    ("untied, trained", {"fsdp": 2, "tensor": 4}),
    ("tied, frozen, blocks", {"data": 2, "fsdp": 2, "tensor": 2}),
]
MORE = [
    ("untied, trained", {"data": 2}),
    ("untied, trained", {"fsdp": 8}),
    ("untied, trained", {"fsdp": 4}),
    ("tied, frozen, blocks", {"fsdp": 2}),
    ("tied, frozen, blocks", {"tensor": 2}),
    ("tied, frozen, blocks", {"tensor": 4}),
    ("tied, frozen, blocks", {"data": 8}),
]


def make_mesh(sizes):
  sizes = {"data": 1, "fsdp": 1, "tensor": 1} | sizes
  n = int(np.prod(list(sizes.values())))
  return sharding.make_mesh(sizes, jax.devices()[:n])


def make_config(changes):
  config = tiny.get_config().unlock()
  config.update_from_flattened_dict(
      {
          "rollout.prompts": 8,
          "rollout.responses": 2,
          "rollout.max_prompt_tokens": PROMPT,
          "rollout.max_new_tokens": NEW,
          "loss.row_tokens": (PROMPT + 2 * NEW,),
          "loss.micro_rows": 4,
          "loss.chunk": 16,
          # Nothing is clipped, because the log-probs of the batch are invented.
          "loss.clip_low": 1.0,
          "loss.clip_high": 1e3,
          "optimizer.rank": 4,
          "optimizer.learning_rate": 1e-2,
          # Adam divides by |gradient| + eps; eps must exceed rounding noise.
          "optimizer.eps": 1e-3,
          "kl.probe_responses": 8,
          "kl.budget": 1e-3,
          "kl.final_budget": 1e-3,
      }
  )
  config.update_from_flattened_dict(changes)
  return config.lock()


def make_batch(config):
  """A batch of random responses of random lengths to left-padded prompts."""
  rng = np.random.default_rng(0)
  n = config.rollout.prompts * config.rollout.responses
  length = PROMPT + NEW
  group = config.rollout.responses
  prompts = rng.integers(VOCAB, size=(n // group, PROMPT)).repeat(group, 0)
  start = rng.integers(PROMPT - 1, size=(n // group, 1)).repeat(group, 0)
  end = PROMPT + rng.integers(1, NEW + 1, size=(n, 1))
  place = np.arange(length)[None]
  completion = (place >= PROMPT) & (place < end)
  tokens = np.concatenate([prompts, rng.integers(VOCAB, size=(n, NEW))], 1)
  rollout = Rollout(
      tokens=tokens.astype(np.int32),
      valid=(place >= start) & (place < end),
      completion_mask=completion,
      log_probs=np.where(completion, -np.log(VOCAB), 0).astype(np.float32),
      finished=end[:, 0] < length,
  )
  return batches.make_batch(
      BatchSettings.of_config(config), rollout, rng.normal(size=n)
  )[0]


class Case:
  """One update of a variant on a mesh."""

  def __init__(self, name, sizes):
    shapes, changes = VARIANTS[name]
    self.config = make_config(changes)
    architecture = DecoderConfig(**SHAPES | shapes)
    self.mesh = make_mesh(sizes)
    sharding.check_model(architecture, self.mesh)
    self.model = decoder.Decoder(load.configure(architecture, self.config))
    params = jax.jit(self.model.init)(
        jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    )["params"]
    # Large enough that attention and logits depend on every weight.
    self.params = jax.tree.map(
        lambda x: x * 8 if x.ndim == 2 and VOCAB in x.shape else x, params
    )
    self.tx = UpdateSettings.of_config(self.config).make_optimizer()

  def start(self):
    state = compiled_step.init_state(
        UpdateSettings.of_config(self.config).optimizer,
        self.params,
        self.tx,
        self.mesh,
    )
    batch = make_batch(self.config)
    return state, batches.put(batch, self.mesh)

  def step(self, state):
    return compiled_step.jit_update(
        self.model,
        self.tx,
        UpdateSettings.of_config(self.config),
        state,
        self.mesh,
    )


@functools.cache
def single(name):
  """State before and after an update on one device, and its metrics."""
  case = Case(name, {})
  with jax.set_mesh(case.mesh):
    state, batch = case.start()
    before = jax.tree.map(np.array, state)
    after = case.step(state)(state, batch)
  return before, *jax.tree.map(np.array, after)


def by_path(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


slow = [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize("name, sizes", CASES + slow)
def test_an_update_is_the_update_on_one_device(name, sizes):
  before, after, metrics = single(name)
  case = Case(name, sizes)
  with jax.set_mesh(case.mesh):
    state, batch = case.start()
    step = case.step(state)
    new_state, new_metrics = step(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    new_metrics = jax.tree.map(np.array, new_metrics)
    got = jax.tree.map(np.array, new_state)
    # The next update takes the new state without compiling again.
    step(new_state, batch)
    assert step._cache_size() == 1
  assert 0 < metrics["kl/step_scale"] < 3 and metrics["kl/skipped"] == 0
  assert new_metrics.keys() == metrics.keys()
  for key, value in metrics.items():
    np.testing.assert_allclose(
        new_metrics[key], value, rtol=1e-4, atol=1e-6, err_msg=key
    )
  for key, value in by_path(after.opt_state).items():
    atol = 1e-5 * np.abs(value).max(initial=0)
    np.testing.assert_allclose(
        by_path(got.opt_state)[key], value, rtol=1e-4, atol=atol, err_msg=key
    )
  all_trained = case.config.optimizer.others == "adam"
  for path, old in by_path(before.params).items():
    new = by_path(after.params)[path]
    moved = np.abs(new - old).max()
    trained = all_trained or ("_proj" in path and "kernel" in path)
    assert moved > 1e-4 if trained else moved == 0, path
    # A factor can round to the next bfloat16, a relative error of 2⁻⁸.
    off = np.abs(by_path(got.params)[path] - new).max()
    assert off <= 1e-2 * moved, (path, moved, off)


def test_weights_and_state_are_split_and_not_copied():
  case = Case("untied, trained", {"fsdp": 2, "tensor": 4})
  with jax.set_mesh(case.mesh):
    state, _ = case.start()
    grads = jax.jit(sketches, static_argnums=0)(case.model, state)
  for tree in (state, grads):
    whole = sum(x.nbytes for x in jax.tree.leaves(tree))
    mine = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)
    )
    assert mine < 0.16 * whole, (mine, whole)  # An eighth, plus small vectors.
    for path, x in by_path(tree).items():
      if re.search(r"_proj.*kernel|embedding|lm_head", path):
        if ".rms" not in path:  # On every device that uses it.
          part = x.addressable_shards[0].data.size / x.size
          assert part == 1 / 8, (path, part)


def sketches(model, state):
  """Gradients of the targets, split as in training."""

  def loss(params):
    tokens = jnp.zeros((8, 4), jnp.int32)
    return jnp.sum(model.apply({"params": params}, tokens))

  _, grads = logra_jax.value_and_grad(loss)(state.params, state.opt_state)
  return sharding.constrain_gradients(grads, state.params)


def collectives(optimizer, mesh):
  """Compiles an update without probe, and counts what devices send.

  Returns:
    The kind and shape of each operand and result; bytes per device by kind; and
    the shapes of the target kernels, without the layer axis.
  """
  shapes = SHAPES | {"d_model": 40, "d_ff": 48, "qkv_bias": True}
  config = make_config(
      {
          "optimizer.name": optimizer,
          "optimizer.rank": 3,
          "loss.micro_rows": 8,
          "kl.enabled": False,
      }
  )
  architecture = DecoderConfig(**shapes)
  lowered = compiled_step.lower_update(architecture, config, make_mesh(mesh))
  text = lowered.compile().as_text()
  moved = [
      (i.op.removesuffix("-start"), shape.dims)
      for body in hlo_text.parse(text).computations.values()
      for i in body.values()
      if i.op.removesuffix("-start") in hlo_cost.COLLECTIVES
      for name in i.operands
      for shape in (*i.shapes, *body[name].shapes)
  ]
  cost = hlo_cost.cost(text)
  assert not cost.unknown_loops
  state = compiled_step.abstract_state(
      decoder.Decoder(load.configure(architecture, config)),
      UpdateSettings.of_config(config),
      make_mesh(mesh),
  )
  kernels = [
      x.shape[1:]
      for path, x in by_path(state.params).items()
      if re.search(r"_proj.*kernel", path)
  ]
  return moved, cost.collective_bytes, kernels


def shapes_of(moved, *kinds):
  """Shapes of collectives of these kinds, without axes of size 1."""
  return {
      tuple(d for d in dims if d > 1) for kind, dims in moved if kind in kinds
  }


@pytest.mark.parametrize(
    "axis", ["fsdp", pytest.param("data", marks=pytest.mark.slow)]
)
def test_gradients_travel_as_sketches(axis):
  """The same program with dense gradients sends whole kernels."""
  thin, thin_bytes, kernels = collectives("logra", {axis: 8})
  dense, dense_bytes, _ = collectives("dense_adam", {axis: 8})
  sums = ("all-reduce", "reduce-scatter")
  summed = shapes_of(thin, *sums)
  assert {(3, d_out) for _, d_out in kernels} <= summed, summed
  assert not summed & {*kernels, *(k[::-1] for k in kernels)}, summed
  whole = shapes_of(dense, *sums)  # Kernels or their transposes.
  assert all({k, k[::-1]} & whole for k in kernels), whole
  for moved in (thin, dense):  # The embedding and the head stay where they are.
    assert not shapes_of(moved, *hlo_cost.COLLECTIVES) & {
        (VOCAB, 40),
        (40, VOCAB),
    }
  # Two layers in float32. All else that both programs sum cancels out here, up
  # to flags for whether a dense gradient is finite.
  n_sketches = 2 * 4 * sum(3 * d_out for _, d_out in kernels)
  n_kernels = 2 * 4 * sum(d_in * d_out for d_in, d_out in kernels)
  total = lambda n_bytes: sum(n_bytes.get(kind, 0) for kind in sums)
  saved = total(dense_bytes) - total(thin_bytes)
  np.testing.assert_allclose(saved, n_kernels - n_sketches, rtol=0.05)
  if axis == "data":  # Only sketches and a few scalars are summed.
    assert n_sketches < total(thin_bytes) < n_sketches + 64


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"rollout.prompts": 6, "rollout.responses": 4},
            "config.rollout.prompts=6 ",
        ),
        ({"loss.micro_rows": 4}, "config.loss.micro_rows=4 "),
        ({"kl.probe_responses": 3}, "config.kl.probe_responses=3 "),
    ],
)
def test_a_batch_that_devices_cannot_share(changes, message, tmp_path):
  shared = {"mesh.data": 2, "mesh.fsdp": 4, "mesh.tensor": 1}
  config = make_config({"loss.micro_rows": 8} | shared | changes)
  with pytest.raises(ValueError, match=f"{message}.* = 8 devices; give"):
    loop.train(config, tmp_path)


MOVED = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


def run(path, changes):
  config = tiny.get_config().unlock()
  config.update_from_flattened_dict(
      {"updates": 2, "kl.probe_responses": 8, "checkpoint.every": 1} | changes
  )
  loop.train(config.lock(), path)
  return record.read_rows(path / record.FILENAME)


def assert_same_record(rows, wanted_rows):
  """Compares all metrics that do not depend on the machine."""
  for row, wanted_row in zip(rows, wanted_rows, strict=True):
    assert row.keys() == wanted_row.keys()
    for name, value in wanted_row.items():
      if metric_names.repeats(name):
        np.testing.assert_allclose(
            row[name], value, rtol=1e-3, atol=1e-6, err_msg=name
        )


@pytest.mark.slow
def test_a_run_on_a_mesh_is_the_run_on_one_device(tmp_path, monkeypatch):
  """Tokens, rewards and KL are the same, also after a change of mesh."""
  make = sharding.make_mesh
  with monkeypatch.context() as patch:
    one = jax.devices()[:1]
    patch.setattr(sharding, "make_mesh", lambda sizes: make(sizes, one))
    wanted = run(tmp_path / "one", {})
  path = tmp_path / "mesh"
  assert_same_record(run(path, MOVED), wanted)
  shutil.rmtree(path / "checkpoints" / "000002")
  assert_same_record(run(path, {"mesh.fsdp": 8}), wanted)


def test_caches_are_split():
  """Responses and key-value heads are split, also while sampling."""
  loaded = tiny_model.make_tiny(0)
  layers, features = loaded.config.n_layers, loaded.config.head_dim
  mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
  where = sharding.shardings(loaded.params, loaded.params, mesh)
  options = decode_steps.Options(Sampling(4, temperature=1.0), (1,))
  config = loaded.config
  with jax.set_mesh(mesh):
    inputs = decode_steps.DecodeInputs(
        sharding.put(loaded.params, where),
        jax.random.key(0),
        np.float32(1),
        None,
    )
    slots = decode_steps.empty(config, 32, 10, 4, "float32")
    model, number = decoder.Decoder(config), np.int32(0)
    lowered = (
        decode_steps.read_prompts.lower(
            model,
            inputs.params,
            np.zeros((8, 10), np.int32),
            np.ones((8, 10), bool),
            "float32",
        ),
        decode_steps.decode.lower(
            model, options, inputs, slots, number, number
        ),
    )
  # The prompts' cache holds 8 prompts of 10 tokens, the slots' 8 · 4 responses
  # of 13 (the last of 10 + 4 is never read), both for two heads. A device has
  # an eighth of each.
  for lowering, size in zip(lowered, (8 * 10 * 2, 32 * 13 * 2), strict=True):
    cache = rf"f32\[{layers},(\d+),(\d+),(\d+),(\d+)\]"
    found = re.findall(cache, lowering.compile().as_text())
    sizes = {np.prod([int(n) for n in dims]) for dims in found}
    assert size * features // 8 in sizes and size * features not in sizes
