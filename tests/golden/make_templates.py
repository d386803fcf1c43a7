"""Renders the templates in this folder with transformers, to templates.json.

  python tests/golden/make_templates.py

The file was made with transformers 5.24. The templates were written for these
tests, in the styles of released models: a default system prompt (Qwen2.5,
SmolLM2), headers and a date (Llama 3), switches and thoughts (Qwen3), marked
generations, and macros.
"""

import datetime
import itertools
import json
import pathlib
from typing import Any
from unittest import mock

import tokenizers
import transformers
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent

CHATS = [
    [{"role": "user", "content": " What is 3 + 5?\n"}],
    [
        {"role": "system", "content": "Only digits & <b>signs</b>. "},
        {"role": "user", "content": "7 + 2?", "facts": {"ä": [1, "<&>"]}},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n9"},
        {"role": "user", "content": "<tool>and 1?</tool>"},
        {"role": "assistant", "content": "1", "reasoning_content": "small"},
    ],
    [
        {"role": "user", "content": "été 😀"},
        {"role": "assistant", "content": ""},
        {"role": "skip", "content": "never"},
        {"role": "user", "content": "on"},
        {"role": "stop", "content": "never"},
        {"role": "user", "content": "never"},
    ],
]

TOOLS = [{"type": "function", "function": {"name": "add", "x": "ü<"}}]

SWITCHES = [
    {},
    {"enable_thinking": False},
    {"date_string": "1 Jan 1970"},
    {"tools": TOOLS},
]


def render(
    tokenizer: transformers.PreTrainedTokenizerFast,
    chat: list[dict[str, Any]],
    prompt: bool,
    switches: dict[str, Any],
) -> str | dict[str, str]:
  """Renders a chat; returns the error if the template refuses it."""
  try:
    return tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=prompt, **switches
    )
  except Exception as error:
    return {"error": str(error)}


def main() -> None:
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<e>": 0}, "<e>"))
  golden = []
  day = datetime.datetime(2024, 7, 26)
  with mock.patch.object(chat_template_utils, "datetime") as clock:
    clock.now.return_value = day
    for file in sorted((HERE / "templates").glob("*.jinja")):
      tokenizer = transformers.PreTrainedTokenizerFast(
          tokenizer_object=backend,
          bos_token="<s>",
          eos_token="<e>",
          chat_template=file.read_text("utf-8"),
      )
      for number, chat in enumerate(CHATS):
        seen = []
        for prompt, switches in itertools.product((True, False), SWITCHES):
          text = render(tokenizer, chat, prompt, switches)
          # Most templates read at most one switch.
          if text not in seen:
            golden.append([file.name, number, prompt, switches, text])
          seen.append(text)
  content = {"chats": CHATS, "rendered": golden}
  text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
  (HERE / "templates.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
  main()
