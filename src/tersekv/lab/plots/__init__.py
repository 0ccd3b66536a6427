"""Plots of a model's keys and of records. Each file in `kinds/` is one kind; `style.render` draws
it."""
