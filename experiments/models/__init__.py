"""The decoder, its tokenizer, and the file formats that they are read from.

Entry points: `load.from_path` and `decoder.Decoder`. May import `configs` and
`parallel`, but not `tasks` and `reporting`, which are on the same layer.
"""
