"""The decoder, its tokenizer, and the formats they are read from.

Entry points: `load.from_path` and `decoder.Decoder`. May import `parallel`
only; `tasks` and `reporting` are beside it, not below.
"""
