"""Numbers for readers: intervals, tables, figures, provenance.

Entry points: `intervals.interval`, `tables.markdown`, `figures.make_figure`
and `provenance.record`. Imports nothing else of `experiments`.
"""
