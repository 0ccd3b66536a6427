"""Where the bytes live and how they grow: append-only packed blocks, exact sinks and tail, and what they weigh."""
