"""Numbers of bytes: estimates, budgets, and allotments of rates."""
