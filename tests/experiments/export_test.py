"""Runs out of their checkpoints, and into transformers."""

import contextlib
import shutil

import chex
import jax
import numpy as np
import pytest

from experiments import export
from experiments.configs import tiny as tiny_config
from experiments.learning import train_step
from experiments.learning.train_step import UpdateSettings
from experiments.models import decoder, hf, load
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts.sampling import Sampling
from experiments.runs import checkpoints, loop, restore
from experiments.runs import workdir as workdir_lib
from tests.helpers.paths import GOLDEN


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run's directory after updates 1 to 3, of which 2 was the best.

  Nothing was trained: at each update all parameters have grown by one.
  """
  config = tiny_config.get_config().unlock()
  config.model = str(GOLDEN / "llama")
  config.optimizer.name = "dense_sgd"
  path = workdir_lib.claim(tmp_path_factory.mktemp("run"), config.lock())
  loaded = load.for_run(config)
  restore.describe_model(path, loaded)
  params = loaded.params
  state = train_step.init_state(
      params, UpdateSettings.of_config(config).make_optimizer()
  )
  with checkpoints.Checkpoints(path / "checkpoints", keep=3) as saved:
    for update, score in ((1, 0.1), (2, 0.9), (3, 0.2)):
      saved.save(update, state.replace(params=grown(params, update)), score)
  return path, params


def grown(params, n):
  return jax.tree.map(lambda x: np.asarray(x) + np.float32(n), params)


def test_the_newest_or_the_best_checkpoint_is_exported(run, tmp_path):
  path, params = run
  assert export.export(path, tmp_path / "new") == 3
  assert export.export(path, tmp_path / "best", "bfloat16", best=True) == 2
  loaded = restore.load_any(tmp_path / "new")
  chex.assert_trees_all_equal(loaded.params, grown(params, 3))
  text = "What is 3 + 5?"
  assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
  # Half the bytes, and eight bits of precision.
  best = restore.load_any(tmp_path / "best")
  chex.assert_trees_all_close(best.params, grown(params, 2), rtol=2**-8)
  size = lambda name: (tmp_path / name / "model.safetensors").stat().st_size
  assert size("best") < 0.6 * size("new")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run of one update that names its base model by a relative path."""
  folder = tmp_path_factory.mktemp("trained")
  shutil.copytree(GOLDEN / "llama", folder / "base")
  config = tiny_config.get_config().unlock()
  config.model = "base"  # As a person in that directory would write.
  config.updates = 1
  config.rollout.prompts = config.rollout.responses = 2
  config.rollout.max_prompt_tokens = 60
  config.loss.row_tokens = (96,)
  config.loss.micro_rows = config.kl.probe_responses = 2
  config.evaluate.prompts = 2
  config.task.name = "addition"
  with contextlib.chdir(folder):
    state = loop.train(config.lock(), folder / "run").state
  return folder, jax.device_get(state.params)


@pytest.mark.parametrize("change", ["elsewhere", "moved", "copied"])
def test_a_run_needs_neither_its_base_model_nor_its_place(
    trained, change, tmp_path, monkeypatch
):
  folder, params = trained
  path = folder / "run"
  if change == "moved":
    shutil.copytree(folder, tmp_path / "here")
    (tmp_path / "here" / "base").rename(tmp_path / "here" / "other")
    path = tmp_path / "here" / "run"
    monkeypatch.chdir(tmp_path / "here")
  elif change == "copied":
    shutil.copytree(path, tmp_path / "machine" / "run")
    path = tmp_path / "machine" / "run"
    monkeypatch.chdir(tmp_path)
  else:
    monkeypatch.chdir("/")
  assert export.export(path, tmp_path / "out") == 1
  loaded = load.from_path(tmp_path / "out")
  chex.assert_trees_all_equal(loaded.params, params)
  text = "What is 3 + 5?"
  original = hf.load_description(GOLDEN / "llama")[1]
  assert loaded.tokenizer.encode(text) == original.encode(text)
  chat = [{"role": "user", "content": text}]
  assert loaded.tokenizer.apply_chat(chat) == original.apply_chat(chat)
  # What evaluation and the server load is the same model.
  again = restore.load_any(path)
  chex.assert_trees_all_equal(again.params, loaded.params)


def test_a_damaged_newest_checkpoint_is_passed_over(run, capsys):
  path, params = run
  file = next((path / "checkpoints" / "000003").rglob("manifest.ocdbt"))
  content = file.read_bytes()
  file.write_bytes(content[:-1])
  try:
    loaded = restore.load_any(path)
  finally:
    file.write_bytes(content)
  chex.assert_trees_all_equal(loaded.params, grown(params, 2))
  assert "falling back to the one before" in capsys.readouterr().out


def test_runs_without_what_is_asked_for(run, tmp_path):
  with pytest.raises(ValueError, match="holds no run"):
    restore.load_run(tmp_path)
  with pytest.raises(FileNotFoundError, match="no model at"):
    restore.load_any(tmp_path / "nothing")
  path = workdir_lib.claim(tmp_path, tiny_config.get_config())
  restore.describe_model(path, load.for_run(workdir_lib.load_config(path)))
  saved = checkpoints.Checkpoints(path / "checkpoints")
  with pytest.raises(ValueError, match="no checkpoint yet"):
    restore.load_any(path)
  saved.save(1, run[1])
  with pytest.raises(ValueError, match=r"no checkpoint in .* has a score"):
    restore.load_run(path, best=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3"])
def test_greedy_responses_are_those_of_transformers(family, tmp_path):
  """llama and qwen2 share head and embedding, llama3 and qwen3 do not."""
  torch = pytest.importorskip("torch", reason="torch is not installed")
  auto = pytest.importorskip("transformers", reason="no transformers")
  config, params, tokenizer = load.from_path(GOLDEN / family)
  hf.save(tmp_path, config, params, tokenizer)
  prompt = np.random.default_rng(0).integers(6, config.vocab_size, 12).tolist()
  sampler = sampler_lib.LocalSampler(
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
