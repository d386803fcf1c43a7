"""Numbers for readers: intervals, tables, figures, provenance.

Entry points: `intervals.interval`, `tables.markdown`, `figures.make_figure`
and `provenance.machine`. Imports only `_optional` from the rest of
`experiments`.
"""
