"""Tests of how a run's settings choose its sampler."""

import dataclasses
import threading

import pytest

from experiments.configs import tiny as tiny_config
from experiments.models import decoder, load, tiny
from experiments.rollouts import engine, remote_sampler
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts import server as server_lib


@pytest.fixture(scope="module")
def loaded():
  return tiny.make_tiny(0)


def settings(**changes):
  config = tiny_config.get_config()
  return dataclasses.replace(
      engine.EngineSettings.of_config(config.rollout), **changes
  )


def make_sampler(loaded, workdir, **changes):
  model = decoder.Decoder(loaded.config)
  return engine.make_sampler(
      settings(**changes), model, loaded.params, loaded.tokenizer, workdir
  )


def test_a_run_without_a_server_samples_in_this_process(loaded, tmp_path):
  sampler = make_sampler(loaded, tmp_path, max_prompt_tokens=9)
  assert isinstance(sampler, sampler_lib.LocalSampler)
  assert sampler.max_prompt_tokens == 9


@pytest.mark.parametrize("sync", [False, True])
def test_a_run_with_a_server_hands_it_weights_if_told_to(
    loaded, tmp_path, sync
):
  served = server_lib.Engine(loaded, "policy", load.from_path)
  with server_lib.Server(served) as server:
    thread = threading.Thread(
        target=server.serve_forever, args=(0.01,), daemon=True
    )
    thread.start()
    sampler = make_sampler(
        loaded, tmp_path, server=server.url, server_sync=sync
    )
    assert isinstance(sampler, remote_sampler.OpenAISampler)
    sampler.update_weights(loaded.params, 7)
    server.shutdown()
    thread.join()
  assert served.version == (7 if sync else 0)
  assert (tmp_path / "served").exists() == sync


def test_slots_default_to_all_responses_of_an_update():
  config = tiny_config.get_config()
  rollout = config.rollout
  assert settings().slots == rollout.prompts * rollout.responses
  with config.unlocked():
    rollout.slots = 3
  assert engine.EngineSettings.of_config(rollout).slots == 3


def test_an_unknown_cache_dtype_is_refused():
  with pytest.raises(ValueError, match="cache_dtype='int4' must be '' or"):
    settings(cache_dtype="int4")
