"""Tests of the page that explains the fields of a config."""

import re

import ml_collections
import pytest

from experiments.configs import quickstart, reference
from tests.helpers.paths import ROOT

_SOURCE = '''
def get_config():
  """Text
  of all."""
  config = ml_collections.ConfigDict()
  config.a = 1  # Behind.
  unrelated = 2
  # Above,
  # and {longer}.
  config.b = (
      "#"
  )
  config.part = _part()
  return config


def _part():
  """Text of the part."""
  part = ml_collections.ConfigDict()
  # Not of c.

  # Above
  part.c = 3  # and behind.
  return part
'''


def _paths(config, prefix=""):
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from _paths(value, f"{prefix}{name}.")
    else:
      yield prefix + name


def test_the_page_is_what_the_config_says():
  page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
  assert (
      page == reference.page()
  ), "run: python -m experiments.configs.reference > docs/config.md"


def test_every_field_is_on_the_page_with_its_default():
  config = quickstart.get_config()
  rows = dict(
      re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", reference.page(), re.M)
  )
  assert sorted(rows) == sorted(_paths(config))
  assert rows["loss.row_tokens"] == "(256,)"
  assert rows["optimizer.learning_rate"] == "1e-05"


def test_texts_are_sentences():
  source = (ROOT / "experiments/configs/quickstart.py").read_text()
  for section in reference.read_sections(source):
    for path, text in [(section.name, section.text), *section.fields]:
      assert re.match(r"[A-Z']", text) and text.endswith("."), path


def test_comments_above_and_behind():
  assert reference.read_sections(_SOURCE) == [
      reference.Section(
          "",
          "Text of all.",
          [
              reference.Field("a", "Behind."),
              reference.Field("b", "Above, and {longer}."),
          ],
      ),
      reference.Section(
          "part",
          "Text of the part.",
          [reference.Field("part.c", "Above and behind.")],
      ),
  ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  # Behind.", r"config\.a has no comment: .* line 6$"),
        ('  """Text of the part."""\n', "'part' .* give _part a docstring"),
    ],
)
def test_a_field_without_a_text_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    reference.read_sections(_SOURCE.replace(text, ""))
