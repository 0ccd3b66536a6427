"""Tables and figures of the papers, run by `papers.py`."""
