"""The solution is graded with, not run as a notebook of the course."""

collect_ignore = ["solution.ipynb"]
