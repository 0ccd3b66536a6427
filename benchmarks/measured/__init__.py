"""Pages of docs/measured: each module makes a page, or several, from records alone."""
