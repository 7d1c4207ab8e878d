"""The paper side by side: a Markdown page for each of its figures and tables, with ours on the same axes.

``python -m experiments.pages.side_by_side write`` makes ``docs/paper`` from ``pages.yaml`` beside this file and from
the committed tables; ``check`` tells which pages no longer agree with them.
"""
