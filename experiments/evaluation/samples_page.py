"""Writes samples of a model as one readable page, in HTML and Markdown."""

from collections.abc import Iterator, Sequence
import html
import itertools
import pathlib
import re
from typing import NamedTuple

_STYLE = """\
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
section { border-top: 1px solid #8886; margin-top: 1.5rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0;
  padding: .5rem .7rem; border-radius: 4px; background: #8881 }
pre.prompt { background: none; border: 1px solid #8884 }
.facts { font-size: 13px; opacity: .75 }
"""


class Sample(NamedTuple):
  """A response and its reward.

  Attributes:
    prompt: The prompt as the model saw it, with special tokens.
    completion: The text of the response.
    reward: The reward of the response.
    tokens: Length of the response in tokens, including the end-of-turn token.
    finished: Whether it ended before the length limit.
    task: Name of the problem's task.
  """

  prompt: str
  completion: str
  reward: float
  tokens: int
  finished: bool
  task: str


def write(
    directory: str | pathlib.Path,
    title: str,
    samples: Sequence[Sample],
    group_size: int,
) -> tuple[pathlib.Path, pathlib.Path]:
  """Writes `samples.html` and `samples.md`.

  Args:
    directory: Directory to write to; created if it does not exist.
    title: Title of the page.
    samples: The samples in the order shown; responses to the same prompt are
      adjacent.
    group_size: Number of responses to each prompt.

  Returns:
    The paths of both files.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  pages = {
      "samples.html": to_html(title, samples, group_size),
      "samples.md": to_markdown(title, samples, group_size),
  }
  for name, text in pages.items():
    (directory / name).write_text(text, "utf-8")
  return directory / "samples.html", directory / "samples.md"


def to_html(title: str, samples: Sequence[Sample], group_size: int) -> str:
  """Returns a self-contained HTML page; see `write` for the arguments."""
  parts = [
      "<!doctype html>",
      '<html lang="en"><meta charset="utf-8">',
      f"<title>{html.escape(title)}</title>",
      f"<style>\n{_STYLE}</style>",
      f"<h1>{html.escape(title)}</h1>",
  ]
  for number, group in enumerate(_groups(samples, group_size)):
    parts.append(
        f'<section><p class="facts">{number}: {html.escape(group[0].task)}</p>'
        f'<pre class="prompt">{html.escape(group[0].prompt)}</pre>'
    )
    for sample in group:
      parts.append(
          f'<p class="facts">{_facts(sample)}</p>'
          f"<pre>{html.escape(sample.completion)}</pre>"
      )
    parts.append("</section>")
  return "\n".join(parts) + "\n</html>\n"


def to_markdown(title: str, samples: Sequence[Sample], group_size: int) -> str:
  """Returns the page as Markdown; see `write` for the arguments."""
  parts = [f"# {title}"]
  for number, group in enumerate(_groups(samples, group_size)):
    parts += [f"## {number}: {group[0].task}", _fenced(group[0].prompt)]
    for sample in group:
      parts += [_facts(sample), _fenced(sample.completion)]
  return "\n\n".join(parts) + "\n"


def _groups(
    samples: Sequence[Sample], group_size: int
) -> Iterator[list[Sample]]:
  """Yields the samples of one prompt at a time."""
  if group_size < 1 or len(samples) % group_size:
    raise ValueError(
        f"group_size={group_size} must divide the {len(samples)} samples"
    )
  rows = iter(samples)
  while group := list(itertools.islice(rows, group_size)):
    yield group


def _facts(sample: Sample) -> str:
  """The line above a completion; it needs no escaping."""
  end = "finished" if sample.finished else "cut at the limit"
  return f"reward {sample.reward:.3g} · {sample.tokens} tokens · {end}"


def _fenced(text: str) -> str:
  """A code block with a fence longer than any run of backticks in the text."""
  runs = map(len, re.findall("`+", text))
  fence = "`" * max(3, 1 + max(runs, default=0))
  return f"{fence}text\n{text}\n{fence}"
