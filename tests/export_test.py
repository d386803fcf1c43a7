"""Runs out of their checkpoints, and into transformers."""

import pathlib

import chex
import jax
import numpy as np
import pytest

from experiments import (
    checkpoints,
    decoder,
    export,
    hf,
    learner,
    optimizers,
    pretrained,
    restore,
    samplers,
    train,
)
from experiments import workdir as workdir_lib
from experiments.configs import tiny as tiny_config
from experiments.sampling import Sampling

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run's directory after updates 1 to 3, of which 2 was the best.

  Nothing was trained: at each update all parameters have grown by one.
  """
  config = tiny_config.get_config()
  path = workdir_lib.claim(tmp_path_factory.mktemp("run"), config)
  params = train.load_model(config).params
  tx = optimizers.make_optimizer(config)
  with checkpoints.Checkpoints(path / "checkpoints", keep=3) as saved:
    for update, score in ((1, 0.1), (2, 0.9), (3, 0.2)):
      state = learner.init_state(
          jax.tree.map(lambda x, n=update: x + n, params), tx
      )
      saved.save(update, state, score)
  return path, params


def grown(params, n):
  return jax.tree.map(lambda x: x + n, params)


def test_the_newest_or_the_best_checkpoint_is_exported(run, tmp_path):
  path, params = run
  assert export.export(path, tmp_path / "newest") == 3
  assert export.export(path, tmp_path / "best", best=True) == 2
  for name, n in (("newest", 3), ("best", 2)):
    loaded = pretrained.load(tmp_path / name)
    chex.assert_trees_all_equal(loaded.params, grown(params, n))
  export.export(path, tmp_path / "small", dtype="bfloat16")
  size = lambda name: (tmp_path / name / "model.safetensors").stat().st_size
  assert size("small") < 0.6 * size("newest")


def test_anything_that_holds_a_model_is_loaded(run, tmp_path):
  path, params = run
  loaded = restore.load_any(path)
  chex.assert_trees_all_equal(loaded.params, grown(params, 3))
  hf.save(tmp_path / "hf", loaded.config, loaded.params, loaded.tokenizer)
  again = restore.load_any(tmp_path / "hf")
  chex.assert_trees_all_equal(again.params, loaded.params)
  assert again.tokenizer.encode("3 + 5") == loaded.tokenizer.encode("3 + 5")
  with pytest.raises(FileNotFoundError, match="no model at"):
    restore.load_any(tmp_path / "nothing")


def test_a_damaged_newest_checkpoint_is_passed_over(run, capsys):
  path, params = run
  file = next((path / "checkpoints" / "000003").rglob("manifest.ocdbt"))
  content = file.read_bytes()
  file.write_bytes(content[:-1])
  try:
    update, loaded = restore.load_run(path)
  finally:
    file.write_bytes(content)
  assert update == 2
  chex.assert_trees_all_equal(loaded.params, grown(params, 2))
  assert "falling back to the one before" in capsys.readouterr().out


def test_runs_without_what_is_asked_for(tmp_path):
  with pytest.raises(ValueError, match="holds no run"):
    restore.load_run(tmp_path)
  config = tiny_config.get_config()
  path = workdir_lib.claim(tmp_path, config)
  saved = checkpoints.Checkpoints(path / "checkpoints")
  with pytest.raises(ValueError, match="no checkpoint yet"):
    restore.load_any(path)
  params = train.load_model(config).params
  tx = optimizers.make_optimizer(config)
  saved.save(1, learner.init_state(params, tx))
  with pytest.raises(ValueError, match=r"no checkpoint in .* has a score"):
    restore.load_run(path, best=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3"])
def test_greedy_responses_are_those_of_transformers(family, tmp_path):
  """llama and qwen2 share head and embedding, llama3 and qwen3 do not."""
  torch = pytest.importorskip("torch", reason="torch is not installed")
  auto = pytest.importorskip("transformers", reason="no transformers")
  config, params, tokenizer = pretrained.load(GOLDEN / family)
  hf.save(tmp_path, config, params, tokenizer)
  prompt = np.random.default_rng(0).integers(6, config.vocab_size, 12).tolist()
  sampler = samplers.LocalSampler(
      decoder.Decoder(config), params, tokenizer, max_prompt_tokens=12
  )
  sampling = Sampling(max_new_tokens=32, temperature=0.0)
  rollout = sampler.sample([prompt], jax.random.key(0), sampling)
  ours = rollout.tokens[0][np.asarray(rollout.completion_mask[0])].tolist()
  model = auto.AutoModelForCausalLM.from_pretrained(
      tmp_path, dtype=torch.float32
  )
  found = model.generate(
      torch.tensor([prompt]), max_new_tokens=32, do_sample=False
  )
  assert found[0, 12:].tolist() == ours
  assert len(ours) == 32 or ours[-1] in tokenizer.eos_ids
  assert len(set(ours)) > 4
