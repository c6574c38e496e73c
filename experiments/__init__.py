"""The studies: each is one table or figure of the paper, or of sedem's own pages.

`python -m experiments` runs, prints and draws them; README.md explains how.
"""
