"""Tests of the decoder's configuration."""

import dataclasses

import pytest

from experiments.models import tiny


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 3}, "n_kv_heads must divide n_heads=4, got 3"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"d_model": 0}, "d_model must be a positive int, got 0"),
        ({"vocab_size": 9.0}, r"vocab_size must be a positive int, got 9\.0"),
    ],
)
def test_a_bad_configuration_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(tiny.CONFIG, **change)
