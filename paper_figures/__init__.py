"""Figures of studies and benchmarks, drawn from tables alone, a file each.

A file here says ``TABLES``, the tables that its figure reads, and ``CAPTION``, its text in the report (in
Markdown), and has ``draw(results: Path) -> Figure``. The figure is called as the file, unless ``TABLES`` maps
the names of several figures to their tables: each is then drawn by ``draw(results, name)``, and ``WORDS`` maps it to
what stands in the braces of its caption. Tables of studies are named ``study/table.csv``, below the folder of a scale;
those of a benchmark lie in its folder, the first one is shown beside the figure. Files without ``TABLES`` hold what
figures share.
"""
